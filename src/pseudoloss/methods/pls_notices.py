"""When PLS goes wrong: what is noticed, and what to try.

The advice names command-line flags; in Python they are settings of the same names.
"""

from collections.abc import Sequence
from itertools import pairwise

from pseudoloss.methods.pseudo_labels import PLSState

ALMOST_ALL = 0.98  # with 80% noise, stage 1 correctly flags up to 95% after the warm-up
ALMOST_NONE = 0.01
# Change of the flagged share from one epoch to the next; in healthy runs it was at most 0.05.
SWING = 0.3
SWINGS, WATCHED = 3, 10  # so many swings in so many epochs

NO_TREND = (
    "--warmup-trend needs a warm-up of at least 2 epochs to see a margin rise; with 1 it does "
    "nothing. Use a longer --warmup."
)

# What the values of a metric are called.
VALUES = {
    "loss": "losses",
    "capped-loss": "losses",
    "agreement": "neighbour agreements",
    "disagreement": "neighbour disagreements",
    "js": "label divergences",
    "kl": "view divergences",
    "pseudo-loss": "pseudo-losses",
    "confidence": "confidences of the pseudo-labels",
    "entropy": "entropies of the pseudo-labels",
}


def stage1_collapsed(state: PLSState, metric: str = "loss") -> str | None:
    """The mixture of stage 1 says nothing about the labels."""
    share = int(state.noisy_N.sum()) / len(state.noisy_N)
    if not bool(state.fitted):
        return (
            f"stage 1 found no two modes in the {VALUES[metric]} (all are equal, or not finite) "
            f"and flags {share:.0%} of the labels. Try a longer --warmup or a lower --lr."
        )
    if share == 0:
        return (
            "stage 1 flags no label, so nothing is corrected. If you know of wrong labels, try a "
            "lower --threshold or a longer --warmup."
        )
    if share > ALMOST_ALL:
        return (
            f"stage 1 flags {share:.0%} of the labels: its mixture has collapsed. Try a longer "
            "--warmup, a higher --threshold or a lower --lr."
        )
    return None


def gate_closed(separation: float, bound: float) -> str:
    """The modes of stage 1 overlap, so nothing is flagged."""
    return (
        f"stage 1 flags no label: its two modes are {separation:.1f} standard deviations apart, "
        f"below --mode-gate {bound:g}, as in data without wrong labels. If you know of wrong "
        "labels, try a lower --mode-gate or a longer --warmup."
    )


def neighbours_collapsed(state: PLSState) -> str | None:
    """The vote of the neighbours says nothing about the labels."""
    share = int(state.noisy_N.sum()) / len(state.noisy_N)
    if share == 0:
        return (
            "stage 1 flags no label, so nothing is corrected: the neighbours of all images agree "
            "with their labels. If you know of wrong labels, try fewer --neighbours."
        )
    if share > ALMOST_ALL:
        return (
            f"stage 1 flags {share:.0%} of the labels: hardly any has the votes of its neighbours. "
            "Try a longer --warmup, more --neighbours or a lower --neighbour-share."
        )
    return None


def stage1_swings(shares: Sequence[float], metric: str = "loss") -> str | None:
    """The share of labels that stage 1 flags jumps up and down from epoch to epoch."""
    shares = shares[-WATCHED - 1 :]
    jumps = [(a, b) for a, b in pairwise(shares) if abs(a - b) > SWING]
    if len(jumps) < SWINGS:
        return None
    before, after = jumps[-1]
    capped = "" if metric == "capped-loss" else "--noise-metric capped-loss, "
    return (
        f"stage 1 is unstable: it flagged {before:.0%} of the labels after one epoch and "
        f"{after:.0%} after the next, with {len(jumps)} such jumps in {len(shares) - 1} epochs. "
        "Its mixture finds no clear modes yet, and the run may take long to recover. Try "
        f"{capped}a longer --warmup, or a lower --lr or --weight-decay."
    )


def stage2_collapsed(state: PLSState, metric: str = "pseudo-loss") -> str | None:
    """The mixture of stage 2 says nothing about the pseudo-labels."""
    if int(state.noisy_N.sum()) <= 2:
        return None
    trust = float(state.trust_N[state.noisy_N].mean())
    if not bool(state.trust_fitted):
        return (
            f"stage 2 found no two modes in the {VALUES[metric]} (all are equal, or not finite); "
            f"the mean trust is {trust:.2f}. Try a longer --warmup or a lower --lr."
        )
    if trust < ALMOST_NONE:
        return (
            "stage 2 trusts no pseudo-label: its mixture has collapsed, and nothing is learned "
            "from the noisy images. Try a longer --warmup or a lower --gamma."
        )
    return None


def classes_flagged(state: PLSState, classes: Sequence[str]) -> str | None:
    """Classes of which every label would have been flagged, while most others are kept."""
    found = [classes[c] for c in state.protected_C.nonzero().flatten().tolist()]
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"stage 1 flags every label of the class {found[0]}{more}; those with the lower losses "
        "were still kept. The network may not have learned a rare class when its labels "
        "were judged. If they are right, try a longer --warmup or a higher --threshold, or add "
        "images."
    )
