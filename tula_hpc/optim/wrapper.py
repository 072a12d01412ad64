"""An optimizer around another one that schedulers, GradScaler, hooks, checkpoints and copies take for a plain one."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tula_hpc.optim import gradients


def _forwarded(name: str) -> Any:
    """An attribute that is the inner optimizer's own, always: a reference kept here goes stale in `load_state_dict`."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class WrappedOptimizer(torch.optim.Optimizer):
    """Everything but `step`. Subclasses add a state of their own under `own_key`: `_own_state`, `_load_own_state` and
    `_forget`.

    The inner optimizer's `_step_supports_amp_scaling` is hidden on purpose: GradScaler would hand over gradients that
    are still multiplied by its loss scale.
    """

    own_key: str
    """Of our part in `state_dict`, beside "inner"."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(self).__name__} got a {type(optimizer).__name__}, but wraps an optimizer; give it "
                "torch.optim.SGD(model.parameters(), lr=...), say."
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"{type(self).__name__} got an optimizer with differentiable=True, but multiplies gradients without a "
                "record of it: what is differentiated through its steps would be wrong; leave that out."
            )
        self.optimizer = optimizer
        self._checked = 0
        # What the base constructor does apart from parameters and state, which we forward: hooks and the hooked step.
        super().__setstate__({})
        self._lists: dict[bool, tuple[list[list[Tensor]], list[Tensor]]] = {}

    param_groups = _forwarded("param_groups")
    state = _forwarded("state")
    defaults = _forwarded("defaults")

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_own_state(self, saved: dict[str, Any]) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Start afresh, after the state of a plain optimizer was loaded."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        gradients.refuse_sharded(self.optimizer.param_groups[-1]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """{"inner": the inner optimizer's state, `own_key`: ours}: tensors and plain values only.

        For `torch.distributed.checkpoint`, which knows plain optimizers alone, save `optimizer.optimizer` there.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state: dict[str, Any] = {"inner": self.optimizer.state_dict(), self.own_key: self._own_state()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain state of the inner optimizer (with a warning). Which groups have
        `ags=False` is the code's to say, and not the state's: it stays as it is."""
        state_dict = dict(state_dict)
        name = type(self).__name__
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        if "inner" in state_dict and self.own_key in state_dict:
            self._load_inner(state_dict["inner"])
            self._load_own_state(state_dict[self.own_key])
        elif "param_groups" in state_dict:
            warnings.warn(f"This is the state of a plain optimizer: {name} starts afresh around it.", stacklevel=2)
            self._load_inner(state_dict)
            self._forget()
        else:
            raise ValueError(
                f"{name}.load_state_dict got the keys {sorted(state_dict)}, but needs 'inner' and {self.own_key!r}, or "
                "the 'state' and 'param_groups' of the inner optimizer; pass what state_dict() returned."
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        kept = [{key: value for key, value in group.items() if key == "ags"} for group in self.param_groups]
        self.optimizer.load_state_dict(state_dict)
        for group, ours in zip(self.param_groups, kept, strict=True):
            group.pop("ags", None)
            group.update(ours)

    def __getstate__(self) -> dict[str, Any]:
        # Like torch's own optimizers, a copy has no hooks; "step" is there when a scheduler has patched this instance.
        # The lists know the parameters by identity, which a copy does not share.
        kept = {k: v for k, v in self.__dict__.items() if k != "step" and not k.endswith("_hooks")}
        return kept | {"_lists": {}}

    def _refuse_unusual(self, found: list[Tensor]) -> None:
        """Refuse gradients that cannot be scaled; looked at when there are more or fewer of them than before."""
        if self._checked != len(found):
            gradients.refuse_unusual(found)
            self._checked = len(found)

    @staticmethod
    def _evaluated(closure: Callable[[], Any] | None) -> Any:
        """What a step's closure returns, with gradients enabled in it; None without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _parameters(self, scaled_only: bool = False) -> list[Tensor]:
        """All parameters in the order of the groups, each once; `scaled_only` leaves out groups with `ags=False`."""
        lists = [g["params"] for g in self.param_groups if not scaled_only or g.get("ags", True)]
        known = self._lists.get(scaled_only)
        # Hashing tensors is slow, so that the list is made anew only if a group or a parameter came, went or changed.
        if known is None or not _same_lists(known[0], lists):
            unique = list(dict.fromkeys(p for parameters in lists for p in parameters))
            known = self._lists[scaled_only] = [list(parameters) for parameters in lists], unique
        return known[1]


def _same_lists(these: list[list[Tensor]], those: list[list[Tensor]]) -> bool:
    return [len(a) for a in these] == [len(b) for b in those] and all(
        all(map(operator.is_, a, b)) for a, b in zip(these, those, strict=True)
    )
