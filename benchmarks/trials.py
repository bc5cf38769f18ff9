"""The trials of PLS with additions: what is run, and how it is decided (docs/lab-notes.md).

Nothing is run here. An arm is a set of settings; `a+b` has those of both. A trial compares an arm
with another one, on the same folds and levels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import mean, stdev
from typing import Any

COMMON: dict[str, Any] = {
    "method": "pls-plus",
    "network": "preactresnet18-stemnorm",
    "ema_decay": 0.999,  # its accuracy is recorded; training does not use it
}
LENGTHS = {"S": (60, 8), "H": (100, 15), "F": (200, 30)}  # epochs, and those of the warm-up
LEVELS = {
    "0": None,
    "20": "symmetric:0.2",
    "50": "symmetric:0.5",
    "80": "symmetric:0.8",
    "asym40": "asymmetric:0.4",
}
HOLD_OUT = 0.1
SCREEN, EXTEND, CONFIRM = (11, 12), (21, 22), (23,)  # folds

TRIVIAL = {"strong_loss": 1.0, "strong_view": "trivial", "strong_cutout": 0.5}
VOTE = {"selection": "neighbours", "relabel": 0.8}
KNN = VOTE | {"warmup": 5}

ARMS: dict[str, dict[str, Any]] = {
    "reference": {},
    "strong": {"strong_loss": 1.0},
    "strong-ramp": {"strong_loss": 1.0, "strong_loss_ramp": 20},
    "first-epoch": {"first_epoch_trust": False},
    "strong-trivial": TRIVIAL,
    "strong-rand": TRIVIAL | {"strong_view": "rand"},
    "threshold-99": {"threshold": 0.99},
    "trend": {"warmup_trend": True},
    "gate": {"mode_gate": 2.0},
    "accumulated": {"loss_momentum": 0.8},
    "ema": {"ema_pseudo_labels": True, "ema_scoring": True, "pseudo_label_mode": "eval"},
    "debias": {"debias": 1.0},
    "capped": {"noise_metric": "capped-loss"},
    "standard-net": {"network": "preactresnet18"},
    "knn": KNN,
    "knn-late": VOTE,
    "low-lr": {"lr": 0.05},
    "knn-low-lr": KNN | {"lr": 0.05},
    "beta4": {"mixup_alpha": 4.0},
    "cutmix": {"cutmix": 0.5},
    "nesterov": {"optimiser": "nesterov", "lr": 0.2, "schedule": "linear"},
    "muon": {"optimiser": "muon", "lr": 0.02},
    "muon-fast": {"optimiser": "muon", "lr": 0.1},
    "one-view": {"pseudo_label_views": 1},
    "flips": {"opposite_flips": True},
    "second": {},  # a new network on the labels that the reference has corrected
}

# ------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Run:
    """One training run."""

    arm: str  # or several: a+b
    length: str
    level: str
    fold: int

    @property
    def name(self) -> str:
        return f"{self.length}-{self.level}-{self.arm}-fold{self.fold}"

    @property
    def settings(self) -> dict[str, Any]:
        epochs, warmup = LENGTHS[self.length]
        found = COMMON | {"epochs": epochs, "warmup": warmup, "corrupt": LEVELS[self.level]}
        for name in self.arm.split("+"):
            found = found | ARMS[name]
        return found

    @property
    def first(self) -> "Run | None":
        """The run whose corrected labels it is trained on."""
        names = self.arm.split("+")
        if "second" not in names:
            return None
        return replace(self, arm=join(*(name for name in names if name != "second")))

    @property
    def seconds(self) -> float:
        """An estimate for one H200, from the epochs of PLS there (docs/speed.md)."""
        settings = self.settings
        W = settings["warmup"]
        return 10 + 0.6 * W + 1.5 * (settings["epochs"] - W)


def join(*names: str) -> str:
    """An arm of several; the reference adds nothing."""
    found = [name for joined in names for name in joined.split("+") if name != "reference"]
    return "+".join(dict.fromkeys(found)) or "reference"


def check_arm(arm: str) -> None:
    for name in arm.split("+"):
        if name not in ARMS:
            raise SystemExit(f"no such arm: {name}; known: {', '.join(ARMS)}")


# ---------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Compared:
    """An arm and the one that it is compared with, run by run."""

    differences: Mapping[str, Sequence[float]]  # by level, in points
    arm: Sequence[Mapping[str, Any]]  # results, in the same order
    against: Sequence[Mapping[str, Any]]
    folds: int  # number of folds that were asked for

    @property
    def mean(self) -> float:
        return mean(self.all)

    @property
    def all(self) -> list[float]:
        return [d for level in self.differences.values() for d in level]

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.all) / sqrt(len(self.all)) if len(self.all) > 1 else float("nan")


Rule = Callable[[Compared], str]


def general(found: Compared) -> str:
    """Accept from +0.6 on; from +0.3 on extend, then accept from +0.4 on; no level below -0.6."""
    worst = min(found.differences, key=lambda level: mean(found.differences[level]))
    if mean(found.differences[worst]) < -0.6:
        return f"reject (below -0.6 at {worst})"
    if found.folds > len(SCREEN):
        return "accept" if found.mean >= 0.4 else "reject"
    if found.mean >= 0.6:
        return "accept"
    return f"extend by folds {EXTEND[0]}, {EXTEND[1]}" if found.mean >= 0.3 else "reject"


def each(bounds: Mapping[str, float]) -> Rule:
    """A bound for the mean of every level."""

    def rule(found: Compared) -> str:
        low = [level for level in bounds if mean(found.differences[level]) < bounds[level]]
        return f"reject (too low at {', '.join(low)})" if low else "accept"

    return rule


def on_average(bound: float) -> Rule:
    return lambda found: "accept" if found.mean >= bound else "reject"


def finds_noise(rule: Rule, level: str, precision: float, recall: float) -> Rule:
    """... and precision and recall of the flags at a level."""

    def stricter(found: Compared) -> str:
        at = [run["detection"] for run in found.arm if run["run"]["level"] == level]
        for name, bound in (("precision", precision), ("recall", recall)):
            value = mean(detection[name] or 0.0 for detection in at)
            if value < bound:
                return f"reject ({name} {value:.3f} at {level})"
        return rule(found)

    return stricter


def keeps_auc(rule: Rule, loss: float) -> Rule:
    """... and the AUC of the loss after the warm-up, mean over the epochs."""

    def stricter(found: Compared) -> str:
        arm, against = (
            mean(auc for run in runs for auc in run["auc_by_epoch"] if auc is not None)
            for runs in (found.arm, found.against)
        )
        return (
            f"reject (AUC {arm:.3f} after {against:.3f})" if arm < against - loss else rule(found)
        )

    return stricter


def faster(rule: Rule, share: float) -> Rule:
    """... and the median time of an epoch of PLS falls by this share."""

    def stricter(found: Compared) -> str:
        arm, against = (
            mean(run["epoch_seconds"]["pls"] for run in runs) for runs in (found.arm, found.against)
        )
        saved = 1 - arm / against
        return f"reject (epochs {saved:.1%} faster)" if saved < share else rule(found)

    return stricter


# ------------------------------------------------------------------------------------------ trials


@dataclass(frozen=True)
class Trial:
    """A comparison that was planned."""

    arm: str
    levels: tuple[str, ...]
    rule: Rule = general
    against: str = "reference"
    length: str = "H"
    folds: tuple[int, ...] = SCREEN
    more: tuple[tuple[str, str], ...] = field(default=())  # lengths and levels on top

    @property
    def own(self) -> bool:
        """The average of the weights is compared with the weights of the same run."""
        return self.arm == self.against

    def pairs(self, base: str, folds: Sequence[int] | None = None) -> list[tuple[Run, Run]]:
        """The runs of the arm, with those that they are compared with."""
        places = [*((self.length, level) for level in self.levels), *self.more]
        return [
            tuple(Run(join(base, arm), length, level, fold) for arm in (self.arm, self.against))  # type: ignore[misc]
            for length, level in places
            for fold in folds or self.folds
        ]


SYMMETRIC = ("20", "50", "80")
START = each({"80": 1.0, "50": -0.3})
FASTER = keeps_auc(on_average(0.8), 0.01)

TRIALS: dict[str, Trial] = {
    "0": Trial("reference", tuple(LEVELS), on_average(0.2), more=(("S", "50"),)),
    "1": Trial("strong", SYMMETRIC),
    "1b": Trial("strong-ramp", SYMMETRIC),
    "1c": Trial("first-epoch", SYMMETRIC),
    "2": Trial("strong-trivial", SYMMETRIC, against="strong"),
    "2b": Trial("strong-rand", SYMMETRIC, against="strong"),
    "3a": Trial("threshold-99", ("0", "20"), each({"0": 0.4, "20": 0.4})),
    "3b": Trial("trend", ("0", "20", "50"), finds_noise(general, "20", 0.82, 0.97)),
    "3c": Trial("gate", ("0", "20"), each({"0": 0.4, "20": -0.2})),
    "4": Trial("accumulated", SYMMETRIC),
    "5": Trial("ema", SYMMETRIC),
    "6": Trial("debias", ("50", "80", "asym40")),
    "6b": Trial("capped", SYMMETRIC),
    "6c": Trial("standard-net", SYMMETRIC),
    "7a": Trial("knn", ("80", "50"), START),
    "7b": Trial("low-lr", ("80", "50"), START),
    "7c": Trial("knn-low-lr", ("80", "50"), START),
    "7d": Trial("knn-late", ("0", "20", "50", "80")),
    "8a": Trial("beta4", ("0", "20", "80")),
    "8b": Trial("cutmix", ("0", "20", "80")),
    "9a": Trial("nesterov", ("50",), FASTER, length="S"),
    "9b": Trial("muon", ("50",), FASTER, length="S"),
    "9c": Trial("muon-fast", ("50",), FASTER, length="S"),
    "10a": Trial("one-view", ("50",), faster(on_average(-0.2), 0.04), length="S"),
    "10b": Trial("flips", ("50",), on_average(0.0), length="S"),
    "11": Trial("second", SYMMETRIC),
}
STACK = "12"  # the number of the trial of what was accepted


def stack_trial(stack: str) -> Trial:
    return Trial(stack, SYMMETRIC, length="F", folds=EXTEND[:1])


def compare(
    trial: Trial,
    results: Mapping[str, Mapping[str, Any]],
    base: str = "reference",
    measure: str = "weights",
    folds: Sequence[int] | None = None,
) -> tuple[Compared | None, str]:
    """What a trial has found, and its verdict. `results` are those of runs, by name; a run that
    failed has the key `failed`."""
    pairs = trial.pairs(base, folds)
    needed = [run for pair in pairs for run in pair]
    failed = [run.name for run in needed if "failed" in results.get(run.name, {})]
    missing = {run.name for run in needed} - results.keys()
    if failed:
        return None, f"reject (failed: {', '.join(dict.fromkeys(failed))})"
    done = [pair for pair in pairs if not {run.name for run in pair} & missing]
    if not done:
        return None, "not run yet"
    differences: dict[str, list[float]] = {}
    ours, theirs = [], []
    for arm, against in done:
        one, other = results[arm.name], results[against.name]
        kinds = ("average", "weights") if trial.own else (measure, measure)
        value, usual = one["accuracy"][kinds[0]], other["accuracy"][kinds[1]]
        place = arm.level if arm.length == trial.length else f"{arm.length} {arm.level}"
        differences.setdefault(place, []).append(value - usual)
        ours.append(one)
        theirs.append(other)
    found = Compared(differences, ours, theirs, len({arm.fold for arm, _ in pairs}))
    if missing:
        return found, f"{len(done)} of {len(pairs)} pairs"
    return found, trial.rule(found)
