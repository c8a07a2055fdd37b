"""Runs the plain script and the port of each program, in turn, and writes what each needed and how good it was.

python examples/ports/measure.py [NAME ...] [--pairs 3] [--out FILE.json]

Without --pairs it prints what the file of figures says (figures.json, unless given); a measurement is added to it.
Each ratio is the median of the pairs' ratios: a machine that others use, too, slows both sides of a pair.
How it is measured: see examples/measuring.py.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import measuring  # noqa: E402 - of examples/

#: How a program says how good a member is, and the difference between the sides' means that chance explains.
QUALITY = {
    "tabm": ("RMSE", 0.05),
    "towers": ("loss", 0.1),
    "monai": ("Dice", 0.08),
    "lora": ("accuracy", 0.04),
    "chemprop": ("loss", 0.15),
}
NEEDED = ("cpu_s", "seconds", "pss_mib")


def run_plain(name):
    with tempfile.TemporaryDirectory() as folder:  # where frameworks write their checkpoints
        needed, printed = measuring.run(["env", "-C", folder, sys.executable, str(HERE / name / "plain.py")])
    return {**needed, "quality": json.loads(printed.strip().splitlines()[-1])}


def run_port(name):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ensemble", "run", str(HERE / name / "port.py"), "--executor", "local"]
        needed, _ = measuring.run([*command, "--run-dir", f"{folder}/run"])
        results = json.loads(Path(folder, "run", "results.json").read_text(encoding="utf-8"))
    return {**needed, "quality": [member["metric"] for member in results["members"]]}


def measure_pair(name, number):
    """One run of each side; every other pair begins with the port."""
    load, sides = os.getloadavg()[0], {}
    for side in ("plain", "port") if number % 2 == 0 else ("port", "plain"):
        sides[side] = run_plain(name) if side == "plain" else run_port(name)
    return {**sides, "load": load}


def summarize(pairs):
    """Medians: what each side needed, the ratios of pairs, and the mean quality of members."""
    row = {}
    for needed in NEEDED:
        for side in ("plain", "port"):
            row[f"{side}_{needed}"] = statistics.median(pair[side][needed] for pair in pairs)
        row[f"ratio_{needed}"] = statistics.median(pair["port"][needed] / pair["plain"][needed] for pair in pairs)
    for side in ("plain", "port"):
        row[f"{side}_quality"] = statistics.mean(value for pair in pairs for value in pair[side]["quality"])
    row["members"] = len(pairs[0]["plain"]["quality"])
    return row


def check_quality(name, row):
    """Both sides do equal work only if they learn the same."""
    difference = abs(row["port_quality"] - row["plain_quality"])
    if difference > QUALITY[name][1]:
        raise SystemExit(f"{name}: the sides differ by {difference:.3f} in {QUALITY[name][0]}: no equal work")


def format_table(figures):
    """The table, and what it is of."""
    lines = [
        "| program | members | metric | CPU-s, script | port | ratio | s, script | port | ratio "
        "| peak MiB, script | port | pairs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, pairs in figures["pairs"].items():
        row = summarize(pairs)
        check_quality(name, row)
        metric = f"{QUALITY[name][0]} {row['plain_quality']:.3f}, {row['port_quality']:.3f}"
        values = [
            f"{row[f'plain_{needed}']:.0f} | {row[f'port_{needed}']:.0f} | {row[f'ratio_{needed}']:.2f}"
            for needed in ("cpu_s", "seconds")
        ]
        memory = f"{row['plain_pss_mib']:.0f} | {row['port_pss_mib']:.0f}"
        lines.append(f"| {name} | {row['members']} | {metric} | {' | '.join(values)} | {memory} | {len(pairs)} |")
    machine = figures["machine"]
    loads = [pair["load"] for pairs in figures["pairs"].values() for pair in pairs]
    lines += [
        "",
        f"Medians of pairs in turn; a ratio is the median of the pairs' ratios. {machine['cpu']}, "
        f"{machine['cores']} cores, used by others as well (load {min(loads):.0f} to {max(loads):.0f}); "
        f"torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(QUALITY))
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "figures.json")
    given = parser.parse_args()
    if not (given.pairs or given.out.exists()):
        parser.error(f"there is no {given.out}: say how many --pairs")
    figures = {"machine": measuring.describe_machine(), "pairs": {}}
    if given.out.exists():
        figures = json.loads(given.out.read_text(encoding="utf-8"))
    measuring.prepare_to_measure()
    for number in range(given.pairs):
        for name in given.names or QUALITY:
            figures["pairs"].setdefault(name, []).append(measure_pair(name, number))
            given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(format_table(figures))


if __name__ == "__main__":
    main()
