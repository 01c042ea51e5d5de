"""`python -m benchmarks` lists the questions and tools; `python -m benchmarks ladder ...` runs one."""
import sys

TOOLS = {
    "assistant": "What should you change in your own model, what does it buy, and is it still the same function?",
    "compare": "Is a change between two recorded runs real?",
    "records": "What does a file of records hold, and does this checkout match it?",
    "notebooks": "Run the notebooks, and record what they print.",
    "kernels": "Do the kernels by hand give the same bits twice?",
    "pages": "Rewrite the generated pages and charts from the recorded runs.",
}


if not __package__:
    print("run it from the project's folder as: python -m benchmarks", file=sys.stderr)
    sys.exit(2)

# Behind the check, and before any module that imports torch: from here on Ctrl-C is one line.
from common.command_line import hush, tell, usage  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """The exit status of the command in `argv`; without one the list of them is printed."""
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    from benchmarks import studies
    from benchmarks.assistant import command as assistant
    from benchmarks.notebooks import command as notebooks
    from benchmarks.records import about, compare
    from benchmarks.show import pages
    from benchmarks.show.study import main as run_study
    hush()
    if name in ("-h", "--help"):
        tell(_listed(studies.every()))
        return 0
    if name not in (*studies.names(), *TOOLS):
        known = ", ".join([*(study.name for study in studies.every()), *TOOLS])
        usage("benchmarks", f"{name}: there is no such question; give one of {known}")
    tools = {"assistant": assistant.main, "notebooks": notebooks.main, "compare": compare.main, "records": about.main}
    if name in tools:
        return tools[name](rest)
    if name == "pages":
        return pages.main(rest, studies.every())
    study = studies.load("fusions" if name == "kernels" else name)
    if name == "kernels":
        from benchmarks.kernels.__main__ import main as kernels
        return kernels(rest)
    return run_study(study, rest)


def _listed(studies) -> str:
    """The questions, then the tools, a line each."""
    lines = ["python -m benchmarks NAME ...          (NAME --help: its options)", ""]
    lines += [f"  {study.name:12} {study.question}" for study in studies]
    lines += ["", *(f"  {name:12} {what}" for name, what in TOOLS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
