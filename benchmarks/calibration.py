"""Simulated developers beside published telemetry of real ones; `KEEPGRAD_DATA` names the data folder.

python benchmarks/calibration.py
"""

from keepgrad.simulate import calibrate


def main() -> None:
    """Print the table."""
    print(calibrate.render(calibrate.table(calibrate.data_folder())))


if __name__ == "__main__":
    main()
