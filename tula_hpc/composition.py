"""From command line to settings: the only file that knows Hydra."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tula_hpc import config
from tula_hpc.checks import check
from tula_hpc.config import Settings, conf_dir, to_plain
from tula_hpc.errors import ConfigError


def _register() -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Settings)


def is_plain(arguments: list[str]) -> bool:
    """Whether the arguments are overrides only (and --config-dir), for one run, without Hydra's own options."""
    rest = _without_config_dir(arguments)[0]
    return not any(a.startswith("-") for a in rest)


def _without_config_dir(arguments: list[str]) -> tuple[list[str], str | None]:
    rest, folder = [], None
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--config-dir", "-cd"):
            folder = next(pending, "")
        elif argument.startswith("--config-dir="):
            folder = argument.split("=", 1)[1]
        else:
            rest.append(argument)
    return rest, folder


def compose(arguments: list[str]) -> Settings:
    """The settings that the overrides make of `conf/`.

    Raises:
        ConfigError: With every override that is wrong, and the names that are known in its place.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides, folder = _without_config_dir(arguments)
    if folder is not None and not (folder and Path(folder).expanduser().is_dir()):
        raise ConfigError([f"--config-dir is {folder!r}, which is not a folder"])
    search = (
        [] if folder is None else [f"hydra.searchpath=[{_quoted(f'file://{Path(folder).expanduser().absolute()}')}]"]
    )
    _register()
    problems: list[str] = []
    composed: Any = None
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        while composed is None:
            try:
                node = hydra_compose("config", overrides=[*search, *overrides])
                problems += [_no_setting(key) for key in _unknown_keys(node)]
                composed = OmegaConf.to_object(node)
            except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                # a name is missing only because the experiment was taken out for its own mistake
                if problems and "missing mandatory value: name" in str(error):
                    break
                unreadable = next(filter(_is_unreadable, overrides), None)
                culprit = unreadable or _culprit(str(error), overrides)
                problems.append(_quote_it(unreadable) if unreadable else _explain(error, culprit))
                if culprit is None:
                    break
                overrides = [o for o in overrides if o != culprit]
    if problems:
        raise ConfigError(problems + (check(composed) if isinstance(composed, Settings) else []))
    return composed


def _unknown_keys(node: Any, schema: Any = None, prefix: str = "") -> list[str]:
    """Keys that `+key=value` added although the schema has no such setting: they would be passed over in silence."""
    schema = schema or Settings()
    known = {field.name for field in dataclasses.fields(schema)}
    found = []
    for key in node:
        name = f"{prefix}{key}"
        if key not in known:
            found.append(name)
        elif dataclasses.is_dataclass(getattr(schema, key)):
            found += _unknown_keys(node[key], getattr(schema, key), f"{name}.")
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _is_unreadable(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return True
    return False


def _quote_it(override: str) -> str:
    """How to give a value with signs that mean something to Hydra."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is not key=value; a command, such as plan, stands first"
    if value[:1] in ("[", "{"):
        return f"{override}: put what holds other signs than letters, digits and -_./:% between quotes of its own"
    wanted = value.strip("'\"").replace('"', '\\"')
    text = f'{key}="{wanted}"'
    return f"{override}: the value has signs that mean something else here; put it between quotes: {shlex.quote(text)}"


def run_root_in(arguments: list[str]) -> tuple[list[str], str]:
    """The other arguments, and the folder that holds the runs; quotes of Hydra's around it are none of its name."""
    rest = [a for a in arguments if not a.startswith("run_root=")]
    roots = [a.partition("=")[2] for a in arguments if a.startswith("run_root=")]
    root = roots[-1] if roots else Settings().run_root
    root = root[1:-1] if len(root) > 1 and root[0] == root[-1] and root[0] in "'\"" else root
    if "${" in root:  # such as ${oc.env:SCRATCH}
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            root = str(OmegaConf.create({"run_root": root}).run_root)
        except OmegaConfBaseException as error:
            raise ConfigError([f"run_root is {root!r}: {str(error).splitlines()[0]}"]) from None
    return rest, root


def _culprit(message: str, overrides: list[str]) -> str | None:
    """The override that an error speaks of; the last one that fits, as it is the one that counts."""
    for override in reversed(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if (
            override in message
            or re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", message)
            or f"{key}/{value}" in message
        ):
            return override
    return None


def _explain(error: Exception, culprit: str | None) -> str:
    """An error of Hydra's in one sentence that names the place and what would have been right."""
    message = str(error)
    cause = str(error.__cause__) if error.__cause__ is not None else ""
    both = f"{message}\n{cause}"
    in_file = re.search(r"In '([^']+)'", both)
    where = f"{in_file[1]}.yaml" if in_file and in_file[1] != "config" else culprit
    about = "" if where is None else f"{where}: "
    if "@experiment" in message:
        return f"{about}its first line must be `# @package _global_`"
    unknown = re.search(r"Key '([^']+)' (?:is not in struct|not in '(\w+)')", both)
    if unknown:
        full_key = re.search(r"full_key: (\S+)", both)
        key = full_key[1] if full_key else (culprit or unknown[1]).lstrip("+~").partition("=")[0]
        return about + _no_setting(key)
    if "Could not find" in message:
        options = re.findall(r"^\s+(\S+)$", message, flags=re.MULTILINE)
        group = re.search(r"Could not find '([^']+)'", message)
        if group and options:
            return f"{about}there is no {group[1]}; known are {', '.join(options)}"
    if "not a subclass of NodeType" in both:  # OmegaConf adds none to those that are there
        return about + _WHOLE_TYPES
    text = "; ".join(line.strip() for line in (cause or message).splitlines() if line.strip())
    if name := re.search(r"Interpolation key '([^']+)' not found", text):
        text += f" (a shell's variable is written ${name[1]}, or \\${{{name[1]}}})"
    return about + re.sub(r";? *(full_key|reference_type|object_type)[=:]\s*\S+", "", text)


_WHOLE_TYPES = (
    "types of node are given all together, in a cluster file of yours or as in '+cluster.node_types={NAME: {partition: "
    "...}, OTHER: {partition: ...}}'; what is there may then be changed one by one"
)


def _no_setting(key: str) -> str:
    """That a key does not exist, with the nearest ones that do."""
    known = {name: default for name, (default, _) in _all_settings()}
    of_a_type = re.fullmatch(r"cluster\.node_types\.([^.]+)\.[^.]+", key)
    if of_a_type:  # the user's own name stands in the place of NAME
        known = {name.replace(".NAME.", f".{of_a_type[1]}."): None for name in known if ".NAME." in name}
    free = next((name for name, default in known.items() if isinstance(default, dict) and key.startswith(name)), None)
    if free == "cluster.node_types":
        return f"{key}: {_WHOLE_TYPES}"
    if free is not None:  # a dictionary of the user's own keys
        new = key.removeprefix(free).strip(".") or "KEY"
        return f"{free} has no {new} yet; add it with +{free}.{new}=VALUE"
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    near = difflib.get_close_matches(key, list(known), n=3) or siblings
    return f"no setting {key!r}; did you mean {', '.join(near)}? `settings` lists them all"


def sweep(arguments: list[str]) -> list[list[str]]:
    """The arguments of each run of a sweep; empty if there is no sweep, or one that only its sweeper plugin knows.

    Raises:
        ConfigError: On an interval without such a plugin.
    """
    if not {"-m", "--multirun"} & set(arguments):
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    rest, folder = _without_config_dir(arguments)
    overrides = [a for a in rest if not a.startswith("-")]
    # a folder of the user's may name one as well
    own_sweeper = folder is not None or any(a.lstrip("+").startswith("hydra/sweeper=") for a in overrides)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        intervals = [text for text, o in zip(overrides, parsed, strict=True) if o.is_interval_sweep()]
        if intervals and not own_sweeper:
            raise ConfigError(
                [f"{text}: nothing says which values of it; list them, as in key=0.1,0.2" for text in intervals]
            )
        values = [
            [f"{override.input_line.partition('=')[0]}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [text]
            for text, override in zip(overrides, parsed, strict=True)
        ]
    except (HydraException, ValueError):  # such as intervals: Hydra and its plugin answer for those
        return []
    given = [] if folder is None else ["--config-dir", folder]
    return [[*given, *each] for each in itertools.product(*values)]


def compose_each(arguments: list[str], act: Callable[[Settings, list[str]], None]) -> None:
    """Let Hydra handle its own options and sweeps.

    Args:
        arguments: The command line.
        act: Called for each run with its settings and the arguments that make them. It must be picklable, because a
            launcher plugin may call it in a job of its own.
    """
    import hydra

    _register()
    rest, folder = _without_config_dir(arguments)
    rest.sort(key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra takes it from between overrides amiss
    given = [] if folder is None else ["--config-dir", str(Path(folder).expanduser().absolute())]
    before = sys.argv
    sys.argv = [before[0], *given, *rest]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(
            functools.partial(_act_on_one, act, given)
        )()
    finally:
        sys.argv = before


def _act_on_one(act: Callable[[Settings, list[str]], None], given: list[str], composed: Any) -> None:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    act(OmegaConf.to_object(composed), [*given, *HydraConfig.get().overrides.task])  # type: ignore[arg-type]


def describe_settings() -> list[str]:
    """Every setting as one line: key, default, and the text that stands below its field."""
    return [f"{key} = {to_plain(default)}" + (f"   {text}" if text else "") for key, (default, text) in _all_settings()]


def _all_settings() -> Iterator[tuple[str, tuple[Any, str]]]:
    texts = _field_texts()
    for section in dataclasses.fields(Settings):
        default = getattr(Settings(), section.name)
        if dataclasses.is_dataclass(default):
            for field in dataclasses.fields(default):
                key = f"{section.name}.{field.name}"
                yield key, (getattr(default, field.name), texts.get((type(default).__name__, field.name), ""))
                if field.name == "node_types":
                    for own in dataclasses.fields(config.NodeType):
                        yield f"{key}.NAME.{own.name}", (own.default, texts.get(("NodeType", own.name), ""))
        else:
            yield section.name, (default, texts.get(("Settings", section.name), ""))


def _field_texts() -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands below the field in config.py."""
    found = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[node.name, field.target.id] = " ".join(str(text.value.value).split())
    return found
