"""The printed reference values, one entry a row, kept as the strings printed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.generators import Case, case_S, duplicates, pitchfork

__all__ = ["EXACT_ROWS", "OT_ROWS", "PITCHFORK_ROWS", "Row", "U_STAR"]

U_STAR = 0.957504024077


@dataclass(frozen=True, eq=False)
class Row:
    """One reference row; a missing entry is not printed. `gradient` is that of the first point."""

    case: Case
    value: str
    cost: str | None = None
    gradient: tuple[str | None, ...] = ()
    lambda_min: str | None = None
    lambda_max: str | None = None
    trace: str | None = None

    def __repr__(self) -> str:
        """The case's name, for test ids."""
        return repr(self.case)


PITCHFORK_ROWS = [
    Row(pitchfork(0.0, 1.0), "1", gradient=("0",), lambda_min="-1"),
    Row(pitchfork(0.0, 0.5), "1", gradient=("0",), lambda_min="-3"),
    Row(pitchfork(0.0, 2.0), "1", gradient=("0",), lambda_min="0"),
    Row(pitchfork(0.0, 2.5), "1", gradient=("0",), lambda_min=".2"),
    Row(pitchfork(0.5, 1.0), ".816219169517", gradient=(".261594155956",), lambda_min=".1600513168"),
    Row(pitchfork(0.5, 1.0, 0.5), ".504885493042", gradient=("-.018941421370",), lambda_min=".1067761335"),
    Row(pitchfork(U_STAR, 1.0), ".673476112573", gradient=("0",), lambda_min=".833627912248"),
]

EXACT_ROWS = [
    Row(
        case_S(5, 7, 2, 1.0),
        "1.494854360715",
        "1.060965552984",
        ("-.031348963960", ".000124116952"),
        ".0563496541",
        ".5883249028",
        "2.7641811309",
    ),
    Row(
        case_S(5, 7, 2, 0.5),
        "1.202098500023",
        None,
        ("-.041437342222", None),
        ".0798412242",
        ".6063391986",
        "3.1254062376",
    ),
    Row(
        case_S(5, 7, 2, 0.1),
        ".828681593065",
        ".725304859296",
        ("-.050245223552", "-.009104726871"),
        ".1333262710",
        ".6665307591",
        "3.9972220930",
    ),
    Row(
        case_S(5, 7, 2, 0.02),
        ".745955964190",
        ".725273675655",
        ("-.050245774235", "-.009104684675"),
        ".1333333333",
        ".6666666667",
        "4.0000000000",
    ),
    Row(
        case_S(5, 7, 2, 0.5, cost_scale=0.5),
        ".747427180358",
        None,
        ("-.015674481980", None),
        ".0281748271",
        ".2941624514",
        "1.3820905654",
    ),
    Row(
        case_S(7, 5, 3, 1.0),
        "2.089839294655",
        "1.422349298300",
        ("-.021217429354", "-.002840835539", "-.033718832777"),
        "-.1306804536",
        ".5",
        "4.4579479635",
    ),
    Row(
        case_S(6, 6, 2, 1.0),
        "1.181969113944",
        ".683170113984",
        ("-.016614658605", ".005328038232"),
        "-.0443206535",
        ".5271384587",
        "2.8192993290",
    ),
]


def _zero_weights() -> Case:
    case = case_S(5, 7, 2, 0.3)
    a, b = np.array([0.5, 0.0, 0.25, 0.25, 0.0]), np.full(7, 1 / 7)
    return case.with_(a=a, b=b, name="O3")


OT_ROWS = {
    "O3": Row(
        _zero_weights(),
        "1.125741826928",
        None,
        ("0.017735031193", "0.247299571964"),
        None,
        ".92925478",
        "3.4250907797",
    ),
    "O6": Row(duplicates(), "1.034706538647", None, (), "-.6007406339"),
    "O17": Row(
        case_S(6, 5, 700, 10.0, uniform=True),
        "706.621034042724",
        "706.077754773698",
        (),
        "-13.2436146778",
        ".3333333333",
        "1297.0497841722",
    ),
}
