from tula_hpc.runs import RunFolder, write_text
def write_report(run: RunFolder) -> None:
    write_text(run.report, "<html></html>")
