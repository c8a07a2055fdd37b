"""Runs plain.py and its three ports on the same data and trials, in turn, and writes what each needed.

python examples/port/measure.py DATA [--out FILE.json] [--repeats 3] [--trials 8] [--epochs 3] ...

Runs are added to those that the file of figures has (figures.json, unless given); without DATA it prints what they
say, the table of docs/how-to/port-a-script.md. How it is measured: see examples/measuring.py.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from measuring import count_changes, describe_machine, prepare_to_measure, run  # noqa: E402 - of examples/

SCRIPTS = ("plain", "attach_only", "train_function", "recipe")
OPTIONS = {"trials": 8, "epochs": 3, "samples": 12000, "together": 4}


def run_script(name, data, options):
    """One run of a script: what it needed and found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / f"{name}.py"), data, "--out", f"{folder}/result.json"]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        needed, _ = run(command)
        return {**needed, **json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))}


def choose_next(counts):
    """The script to run next: of those with the fewest runs, beginning with another one in each round."""
    return min(SCRIPTS, key=lambda name: (counts[name], (SCRIPTS.index(name) - counts[name]) % len(SCRIPTS)))


def summarize(runs):
    """A row per script: its lines, as the file is now, and the medians of its runs."""
    rows = []
    for name in SCRIPTS:
        added, removed = count_changes(HERE / "plain.py", HERE / f"{name}.py")
        medians = {key: statistics.median(r[key] for r in runs[name]) for key in ("seconds", "cpu_s", "pss_mib")}
        accuracy = statistics.mean(compare_trials(runs)[name].values())
        rows.append({"script": name, "added": added, "removed": removed, **medians, "accuracy": accuracy})
    return rows


def compare_trials(runs):
    """Of each script, accuracy by hyperparameters: the mean over its runs."""
    found = {}
    for name in SCRIPTS:
        values = {}
        for trial in (trial for each in runs[name] for trial in each["trials"]):
            values.setdefault(json.dumps(trial["params"], sort_keys=True), []).append(trial["value"])
        found[name] = {point: statistics.mean(values[point]) for point in sorted(values)}
    return found


def format_table(figures):
    """What the page shows: the table, and what it is of."""
    lines = [
        "| script | lines added | lines removed | seconds | CPU-seconds | peak memory, MiB | mean accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summarize(figures["runs"]):
        values = f"{row['seconds']:.1f} | {row['cpu_s']:.0f} | {row['pss_mib']:.0f} | {row['accuracy']:.3f}"
        lines.append(f"| `{row['script']}.py` | {row['added']} | {row['removed']} | {values} |")
    options, machine, repeats = figures["options"], figures["machine"], len(figures["runs"]["plain"])
    lines += [
        "",
        "One run of each." if repeats == 1 else f"Medians of {repeats} runs of each, in turn.",
        f"{options['trials']} trials, {options['together']} at a time, {options['epochs']} epochs of "
        f"{options['samples']:,} images of CIFAR-10, of which a tenth validates.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}; torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", type=Path, default=HERE / "figures.json")
    for name, default in {"repeats": 3, **OPTIONS}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    about = {"options": {name: getattr(given, name) for name in OPTIONS}, "machine": describe_machine()}
    figures = (
        json.loads(given.out.read_text(encoding="utf-8"))
        if given.out.exists()
        else {**about, "runs": {s: [] for s in SCRIPTS}}
    )
    if given.data is not None:
        if {key: figures[key] for key in about} != about:
            raise SystemExit(f"{given.out} has runs with other options or of another machine: give another --out")
        prepare_to_measure()
        for _ in range(given.repeats * len(SCRIPTS)):
            name = choose_next({name: len(runs) for name, runs in figures["runs"].items()})
            figures["runs"][name].append(run_script(name, given.data, about["options"]))
            given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    elif not given.out.exists():
        parser.error(f"there is no {given.out}: name the folder of the data")
    print(format_table(figures))


if __name__ == "__main__":
    main()
