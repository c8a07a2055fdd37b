"""Runs the plain scripts and their members on the same data, in turn, and writes what each needed and found.

python examples/frameworks/measure.py DATA [--out FILE.json] [--seeds 8] [--only lightning,timm]

Of each framework: the plain script, once for each seed, and one run of as many members. Without DATA it prints
what the file of figures says (figures.json, unless given). How it is measured: see examples/measuring.py.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import measuring  # noqa: E402 - of examples/

FRAMEWORKS = ("lightning", "transformers", "accelerate", "timm")


def run_plain(framework, data, seed):
    """One run of the plain script."""
    with tempfile.TemporaryDirectory() as folder:  # where the frameworks write their checkpoints
        command = [sys.executable, str(HERE / f"{framework}_plain.py"), data, "--seed", str(seed)]
        needed, printed = measuring.run(["env", "-C", folder, *command])
    return {**needed, "accuracy": float(re.findall(r"accuracy (0\.\d+)", printed)[-1])}


def run_members(framework, data, seeds):
    """One run of as many members."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ensemble.cli", "run", str(HERE / f"{framework}_member.py")]
        command += ["--set", f"data={data}", "--set", f"seeds={seeds}", "--executor", "local"]
        needed, _ = measuring.run([*command, "--run-dir", f"{folder}/run"])
        found = json.loads(Path(folder, "run", "results.json").read_text(encoding="utf-8"))
    accuracies = [row["metric"] for row in found["members"]]
    return {**needed, "accuracies": accuracies, "combined": found["combined"]["metrics"]["ensemble"]["accuracy"]}


def summarize(found):
    """The row of a framework: the plain runs one after another, beside the members."""
    plain, members = found["plain"], found["members"]
    accuracies = [each["accuracy"] for each in plain]
    return {
        "plain": statistics.mean(accuracies),
        "plain_spread": statistics.stdev(accuracies),
        "members": statistics.mean(members["accuracies"]),
        "members_spread": statistics.stdev(members["accuracies"]),
        "combined": members["combined"],
        "plain_cpu_s": sum(each["cpu_s"] for each in plain),
        "members_cpu_s": members["cpu_s"],
        "plain_seconds": sum(each["seconds"] for each in plain),
        "members_seconds": members["seconds"],
    }


def format_table(figures):
    """The table, and what it is of."""
    lines = [
        "| framework | lines added | removed | accuracy, scripts | accuracy, members | combined | CPU-s, scripts "
        "| CPU-s, members | s, scripts | s, members |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in figures["found"].items():
        row = summarize(found)
        added, removed = measuring.count_changes(HERE / f"{name}_plain.py", HERE / f"{name}_member.py")
        values = [f"{row[f'{side}']:.3f} ± {row[f'{side}_spread']:.3f}" for side in ("plain", "members")]
        values += [f"{row['combined']:.3f}"]
        values += [
            f"{row[f'{side}_{unit}']:.0f}" for unit in ("cpu_s", "seconds") for side in ("plain", "members")
        ]
        lines.append(f"| {name} | {added} | {removed} | {' | '.join(values)} |")
    machine = figures["machine"]
    lines += [
        "",
        f"{figures['seeds']} seeds; ± is their standard deviation. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['gpu'] or 'no GPU'}; torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", type=Path, default=HERE / "figures.json")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", default=",".join(FRAMEWORKS))
    given = parser.parse_args()
    if given.data is not None:
        measuring.prepare_to_measure()
        figures = {"seeds": given.seeds, "machine": measuring.describe_machine(), "found": {}}
        for name in given.only.split(","):
            members = run_members(name, given.data, given.seeds)
            plain = [run_plain(name, given.data, seed) for seed in range(given.seeds)]
            figures["found"][name] = {"plain": plain, "members": members}
            given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    elif given.out.exists():
        figures = json.loads(given.out.read_text(encoding="utf-8"))
    else:
        parser.error(f"there is no {given.out}: name the folder of the data")
    print(format_table(figures))


if __name__ == "__main__":
    main()
