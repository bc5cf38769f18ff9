"""What the paper's tables print for every method, and what is known about these numbers.

A published number is the accuracy of the best test epoch. Names of methods are those of `--method`;
those of methods that pseudoloss does not have are made in the same way. This module is fast to
import: it does not load torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class PublishedMethod(NamedTuple):
    """A method of the paper's tables."""

    title: str
    column: str  # what the paper's tables call it
    reference: str


METHODS: dict[str, PublishedMethod] = {
    "pls": PublishedMethod("PLS", "PLS", "Albert et al., WACV 2023"),
    "ce": PublishedMethod("cross-entropy", "CE", "–"),
    "mixup": PublishedMethod("mixup", "M", "Zhang et al., ICLR 2018"),
    "dynamic-bootstrapping": PublishedMethod(
        "Dynamic Bootstrapping", "DB", "Arazo et al., ICML 2019"
    ),
    "divide-mix": PublishedMethod("DivideMix", "DM", "Li et al., ICLR 2020"),
    "elr": PublishedMethod("ELR", "ELR", "Liu et al., NeurIPS 2020"),
    "elr-plus": PublishedMethod("ELR+", "ELR+", "Liu et al., NeurIPS 2020"),
    "rrl": PublishedMethod("RRL", "RRL", "Li et al., ICCV 2021"),
    "moit-plus": PublishedMethod("MOIT+", "MOIT+", "Ortego et al., CVPR 2021"),
    "sel-cl-plus": PublishedMethod("Sel-CL+", "Sel-CL+", "Li et al., CVPR 2022"),
    "jo-src": PublishedMethod("Jo-SRC", "JoSRC", "Yao et al., CVPR 2021"),
    "evidential-mix": PublishedMethod("EvidentialMix", "EDM", "Sachdeva et al., WACV 2021"),
    "dsos": PublishedMethod("DSOS", "DSOS", "Albert et al., WACV 2022"),
    "sncf": PublishedMethod("SNCF", "SNCF", "Albert et al., ECCV 2022"),
    "mentor-mix": PublishedMethod("MentorMix", "MM", "Jiang et al., ICML 2020"),
    "famus": PublishedMethod("FaMUS", "FaMUS", "Xu et al., CVPR 2021"),
    "scan-mix": PublishedMethod("ScanMix", "SM", "Sachdeva et al., 2021"),
    "prop-mix": PublishedMethod("PropMix", "PM", "Cordeiro et al., BMVC 2021"),
    "co-teaching": PublishedMethod("Co-teaching", "Co-teaching", "Han et al., NeurIPS 2018"),
    "pencil": PublishedMethod("PENCIL", "PENCIL", "Yi and Wu, CVPR 2019"),
    "selfie": PublishedMethod("SELFIE", "SELFIE", "Song et al., ICML 2019"),
    "peer-learning": PublishedMethod("Peer-learning", "Peer-learning", "Sun et al., ICCV 2021"),
    "plc": PublishedMethod("PLC", "PLC", "Zhang et al., ICLR 2021"),
}


def method_title(method: str) -> str:
    """What a method is called in tables and plots; one that is not known by its own name."""
    return METHODS[method].title if method in METHODS else method


class Doubt(NamedTuple):
    """What to know about the numbers of a method before comparing with them."""

    method: str
    text: str
    rows: tuple[str, ...] = ()  # all rows if empty


@dataclass(frozen=True)
class Numbers:
    """A table of the paper.

    Attributes:
        rows: the names of its rows.
        methods: the numbers of each method, in the order of the rows.
        pls_std: standard deviations of PLS, the only ones that all tables but one print.
        doubts: about the numbers of single methods.
        remarks: about the whole table.
        std: other standard deviations, by method and row.
    """

    rows: tuple[str, ...]
    methods: Mapping[str, tuple[float, ...]]
    pls_std: tuple[float, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    remarks: tuple[str, ...] = ()
    std: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def accuracy(self, method: str, row: str) -> float | None:
        values = self.methods.get(method)
        return None if values is None else values[self.rows.index(row)]

    def deviation(self, method: str, row: str) -> float | None:
        if method == "pls" and self.pls_std:
            return self.pls_std[self.rows.index(row)]
        return self.std.get((method, row))

    def about(self, method: str, row: str) -> tuple[str, ...]:
        """What to know about a number."""
        about = [doubt for doubt in self.doubts if doubt.method == method]
        return tuple(doubt.text for doubt in about if row in (doubt.rows or self.rows))


ID_NOISE = Numbers(
    ("id0", "id20", "id50", "id80"),
    {
        "pls": (78.85, 80.03, 76.48, 63.33),
        "ce": (76.99, 62.60, 46.59, 23.46),
        "mixup": (79.29, 71.55, 61.12, 37.66),
        "dynamic-bootstrapping": (64.79, 73.9, 66.1, 45.67),
        "divide-mix": (72.75, 77.3, 74.6, 60.2),
        "elr-plus": (83.14, 77.6, 73.6, 60.08),
        "moit-plus": (77.07, 75.89, 67.54, 51.36),
        "sel-cl-plus": (79.90, 76.5, 72.4, 59.6),
        "rrl": (80.70, 79.4, 75.0, 32.21),
    },
    pls_std=(0.21, 0.15, 0.25, 0.38),
    std={("rrl", "id20"): 0.1, ("rrl", "id50"): 0.4},
    doubts=(
        Doubt(
            "elr-plus",
            "doubtful: the paper prints the 80.70 of RRL in bold, as the best of this row; noisypy "
            "(github.com/KlemenVovk/noisy-labels) gets 78.82 ± 0.24 with ELR+ without noise",
            ("id0",),
        ),
        Doubt("elr-plus", "probably a typo of 60.8, the number of the ELR paper", ("id80",)),
        Doubt(
            "divide-mix",
            "depends on λ_u: noisypy gets 78.22 ± 0.06 without noise and with λ_u = 0",
            ("id0",),
        ),
        Doubt(
            "dynamic-bootstrapping",
            "the public program draws wrong labels from the classes 0 to 9 only, on CIFAR-100 too; "
            "whether the published numbers are affected is not known",
            ("id20", "id50", "id80"),
        ),
        Doubt(
            "dynamic-bootstrapping",
            "the README of its program has 70.3 (M-DYR-H) and 73.3 (MD-DYR-SH)",
            ("id0",),
        ),
        Doubt(
            "dynamic-bootstrapping",
            "the README of its program has 48.2 (M-DYR-H) and 41.6 (MD-DYR-SH); other papers "
            "print 48.2",
            ("id80",),
        ),
        Doubt("moit-plus", "other papers print 70.1 for MOIT", ("id50",)),
        Doubt(
            "rrl",
            "the RRL paper has 57.7; the best epoch before a NaN would look like this",
            ("id80",),
        ),
    ),
    remarks=(
        "published, other methods: at 20, 50 and 80% from their papers or run by the authors of "
        "PLS, the paper does not say which; at 0% run by the authors of PLS",
        "published: symmetric noise is drawn in different ways (PLS: each label by chance, the "
        "true class included; DivideMix, RRL, ELR, Sel-CL: an exact count, the true class "
        "included; MOIT: an exact count without the true class)",
    ),
)

OOD_NOISE = Numbers(
    (
        *("inet-20-20", "inet-40-20", "inet-60-20", "inet-40-40"),
        *("places-20-20", "places-40-20", "places-60-20", "places-40-40"),
    ),
    {
        "pls": (76.29, 72.06, 57.78, 56.92, 76.35, 71.65, 57.31, 55.61),
        "ce": (63.68, 58.94, 46.02, 41.39, 59.88, 53.46, 39.55, 32.06),
        "mixup": (66.71, 59.54, 42.87, 38.37, 66.31, 59.75, 39.17, 34.36),
        "dynamic-bootstrapping": (65.61, 54.79, 42.50, 35.90, 65.85, 55.81, 40.75, 35.05),
        "jo-src": (67.37, 61.70, 37.95, 41.53, 67.06, 60.83, 39.83, 33.23),
        "elr": (68.71, 63.21, 44.79, 34.82, 68.58, 62.66, 37.10, 34.71),
        "evidential-mix": (71.03, 61.89, 21.88, 24.15, 70.46, 61.80, 23.67, 20.33),
        "dsos": (70.54, 62.49, 49.98, 43.69, 69.72, 59.47, 35.48, 29.54),
        "rrl": (72.64, 66.04, 26.76, 31.29, 72.62, 65.82, 49.27, 26.67),
        "sncf": (72.95, 67.62, 53.26, 54.04, 71.25, 64.03, 49.83, 50.95),
    },
    pls_std=(0.28, 0.19, 0.26, 0.49, 0.05, 0.61, 0.31, 0.55),
    doubts=tuple(
        Doubt(method, "its own program has no run on these data with this network")
        for method in ("jo-src", "evidential-mix")
    ),
    remarks=(
        "published, other methods: from the SNCF paper, whose program has no settings for them "
        "(that of DSOS has its own for ImageNet32); so there is nothing to repeat but the numbers",
    ),
)

CNWL = Numbers(
    ("cnwl-20", "cnwl-40", "cnwl-60", "cnwl-80"),
    {
        "pls": (63.10, 60.02, 54.41, 46.51),
        "ce": (47.36, 42.70, 37.30, 29.76),
        "mixup": (49.10, 46.40, 40.58, 33.58),
        "divide-mix": (50.96, 46.72, 43.14, 34.50),
        "mentor-mix": (51.02, 47.14, 43.80, 33.46),
        "famus": (51.42, 48.03, 45.10, 35.50),
        "scan-mix": (59.06, 54.54, 52.36, 40.00),
        "prop-mix": (61.24, 56.22, 52.84, 43.42),
        "sncf": (61.56, 59.94, 54.92, 45.62),
    },
    pls_std=(0.14, 0.15, 0.49, 0.20),
    doubts=(
        Doubt("mentor-mix", "of FaMUS's program: ResNet-32, 200,000 steps (about 512 epochs)"),
        Doubt("divide-mix", "two networks that predict together, 300 epochs"),
        Doubt("famus", "two networks that predict together, 300 epochs"),
        Doubt(
            "scan-mix",
            "ResNet-18 (not pre-activation), two networks, 300 epochs after 500 of SimCLR",
        ),
        Doubt("prop-mix", "its program has no settings for these data"),
    ),
    remarks=("published, other methods: from the PropMix paper, says the paper",),
)

WEB_FG = Numbers(
    ("aircraft", "bird", "car"),
    {
        "pls": (87.58, 79.00, 86.27),
        "ce": (60.80, 64.40, 60.60),
        "co-teaching": (79.54, 76.68, 84.95),
        "pencil": (78.82, 75.09, 81.68),
        "selfie": (79.27, 77.20, 82.90),
        "divide-mix": (82.48, 74.40, 84.27),
        "peer-learning": (78.64, 75.37, 82.48),
        "plc": (79.24, 76.22, 81.87),
    },
    doubts=(
        Doubt(
            "peer-learning",
            "the models that its authors offer are of another network (B-CNN on VGG-16): 74.38, "
            "76.48 and 78.52 on aircraft, bird and car",
        ),
    ),
    remarks=(
        "published, other methods: from the PNP paper (CVPR 2022), ResNet-50 at 448 pixels; their "
        "settings are not in its program",
    ),
)
