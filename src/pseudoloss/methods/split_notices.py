"""When a network splits the labels into groups that are trained differently, and one is empty.

The advice names command-line flags; in Python they are settings of the same names.
"""

from collections.abc import Sequence

from pseudoloss.methods.pls_notices import VALUES


def empty_split(role: str, kept: float, fitted: bool, metric: str = "loss") -> str | None:
    """One of the two streams of a step would have no images: all stand in for them."""
    what = f"the {role} network"
    if not fitted:
        return (
            f"{what} finds no two modes in its {VALUES[metric]} (all are equal, or not finite) and "
            f"keeps {kept:.0%} of the labels. Try a longer --warmup or a lower --lr."
        )
    if kept == 0:
        return (
            f"{what} keeps no label, so all images are trained with labels that are mostly "
            "replaced. Try a longer --warmup, or a lower --lr or --threshold."
        )
    if kept == 1:
        return (
            f"{what} keeps every label, so nothing is corrected. If you know of wrong labels, try "
            "a higher --threshold or a longer --warmup."
        )
    return None


def empty_groups(clean: int, closed: int, images: int, fitted: bool) -> str | None:
    """A group that the classifier is trained on has one image, which is always in it."""
    if not fitted:
        return (
            "the evidential losses are all equal, or not finite, so every label counts as clean. "
            "Try a longer --warmup or a lower --lr."
        )
    if clean <= 1 < images:
        return (
            "only one label counts as clean, so the classifier is trained with a single label. "
            "Try a longer --warmup or a lower --lr."
        )
    if closed <= 1 < images:
        return (
            "only one label counts as wrong, so almost nothing is corrected. If you know of wrong "
            "labels of images of these classes, try a longer --warmup."
        )
    return None


def no_evidence(without: Sequence[str], classes: int) -> str | None:
    """A class that has lost all evidence has no gradient to win it back."""
    if not without:
        return None
    return (
        f"the evidential network has no evidence for {len(without)} of {classes} classes (the "
        f"first: {without[0]}). Their images count as out-of-distribution, so the classifier "
        "forgets these classes. Try another --seed, a longer --warmup or a lower --lr."
    )
