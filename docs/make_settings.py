"""Writes docs/settings.md from the settings themselves: python docs/make_settings.py"""

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from pseudoloss.cli.train import train_parser
from pseudoloss.config import (
    METHOD_SETTINGS,
    DetectionSettings,
    Settings,
    as_flag,
    as_json,
    as_text,
    describe_settings,
    flag,
)
from pseudoloss.presets import NEEDS, PRESETS
from pseudoloss.reading import READ_OPTIONS

HEAD = """# Settings

Every setting is a flag of `pseudoloss train`, a keyword of `pl.train` and, with underscores, a key
of a `--config` file. Values come from the preset (`--preset NAME`, or the one that fits the data),
then from the file (`--config FILE.toml`, with lines such as `epochs = 100`), then from flags. An
unknown name is an error. `pseudoloss presets NAME` shows every setting of a preset;
`pseudoloss train --method NAME --help` shows those of a method.

For your own images some values are chosen to fit the data unless you set them: the batch size (at
least eight steps per epoch; the learning rate is scaled with it), the prior of the class balance
(`given` if one class has twice the images of another), image size and normalisation (those of the
pretrained network), and for image files on a CPU a small network and 30 epochs instead of
`preactresnet18`, and 3 epochs and batches of at most 16 for photographs (`finetune`; without
`--head-start` 10 epochs at 128 pixels).
This holds for files with any preset and for arrays without one. The run prints what it uses, and
`config.json` records it.

This page is written by `python docs/make_settings.py`.
"""

SHARED = """## Shared settings

All methods have these.
"""

DETECTION = """## Flagging labels

All methods have these but {}, which flag labels in their own way.
"""

# Titles of the methods; one without an entry is called by its name.
TITLES = {
    "pls": "Pseudo-Loss Selection",
    "pls-plus": "PLS with additions",
    "ce": "cross-entropy",
    "mixup": "mixup",
    "dynamic-bootstrapping": "Dynamic Bootstrapping",
    "elr": "Early-Learning Regularisation",
    "elr-plus": "ELR+",
    "co-teaching": "Co-teaching",
    "divide-mix": "DivideMix",
    "dsos": "Dynamic Softening of Out-of-distribution Samples",
    "rrl": "Robust Representation Learning",
    "evidential-mix": "EvidentialMix",
    "jo-src": "Jo-SRC",
}

WHEN = {
    "method": "To compare with a baseline or a rival on your data.",
    "network": "small-cnn on a CPU, a larger timm model for more accuracy.",
    "weights": "Photographs: embedded; with another network pretrained, or a file if there is no "
    "internet connection.",
    "head_start": "On in finetune. Off to train from a new classifier; on with other weights.",
    "projection": "Rarely.",
    "epochs": "More for accuracy, fewer for time; or let `--time` choose.",
    "warmup": "Longer if a notice says that the warm-up ended at chance.",
    "batch_size": "Smaller if memory is short (or `--accumulate`), larger on a large GPU.",
    "accumulate": "A batch does not fit into GPU memory.",
    "lr": "Lower if the loss becomes NaN or the warm-up ends at chance.",
    "schedule": "To repeat a method with its own schedule.",
    "optimiser": "adam for timm transformers, muon for fewer epochs (to try), or to "
    "repeat a method with its own optimiser.",
    "momentum": "Rarely.",
    "weight_decay": "Less for small datasets and fine-tuning, more against overfitting.",
    "threshold": "Lower with very many wrong labels; higher if good labels are flagged.",
    "threshold_on": "For the paper's rule.",
    "noise_metric": "capped-loss if a notice says that stage 1 is unstable, or at about 80% "
    "noise; the others for comparisons.",
    "protect_rare_classes": "Off for the paper's stage 1.",
    "gamma": "Closer to 1 if pseudo-labels are confident and wrong.",
    "pseudo_label_norm": "max for the paper's form.",
    "pseudo_label_mode": "For comparisons; eval if batches are too small for statistics.",
    "weighting": "interpolated for the paper's form, first for another commit of the released "
    "program.",
    "trust_metric": "For comparisons.",
    "trust_threshold": "With `--trust-metric threshold`.",
    "initial_trust": "On for the paper's Algorithm 1.",
    "mu": "Rarely.",
    "contrast_class": "own for the paper's form.",
    "contrast_labels": "mixed for the paper's form.",
    "contrast_mix": "separate for the paper's form.",
    "balance": "Lower if rare classes are predicted too often; 0 if the shares are unknown.",
    "balance_prior": "given for imbalanced classes; chosen automatically for folders and tables.",
    "mixup_alpha": "mixup: 8 to 32 with many wrong labels. Others: rarely.",
    "mixup_lambda": "uniform for the paper's form.",
    "correct": "Ablation.",
    "contrast": "Ablation; off is faster.",
    "trust_in_classification": "Ablation.",
    "trust_in_contrast": "Ablation.",
    "mixup": "Ablation; off if mixed images make no sense.",
    "strong_loss": "1 to train the classifier on the strong view too.",
    "strong_loss_ramp": "If the accuracy falls behind the warm-up.",
    "strong_view": "With `--strong-loss`: trivial or rand, which leave more of the image.",
    "strong_cutout": "0.5 with trivial or rand.",
    "cutmix": "0.5 for half of the batches.",
    "first_epoch_trust": "Off if the accuracy falls behind the warm-up.",
    "debias": "1 if some classes are predicted too often.",
    "debias_momentum": "Rarely.",
    "ema_pseudo_labels": "To try; with `--pseudo-label-mode eval`.",
    "ema_scoring": "To try.",
    "ema_prediction": "To try; training stays the same.",
    "ema_decay": "pls-plus: 0.999; 0.99 for runs of a few thousand steps. elr-plus: rarely.",
    "loss_momentum": "0.8 if the share of flagged labels changes from epoch to epoch.",
    "warmup_trend": "If right labels are flagged.",
    "mode_gate": "If there may be no wrong labels; `metrics.jsonl` has the d′ of every epoch.",
    "pseudo_label_views": "1 for speed.",
    "opposite_flips": "To try; not with `--no-flip`.",
    "selection": "neighbours with very many wrong labels.",
    "neighbours": "Fewer in small datasets: at most the images of a class.",
    "neighbour_share": "Lower to flag fewer labels.",
    "relabel": "0.8 or 0.9 with `--selection neighbours`.",
    "bootstrapping": "soft-to-hard where hard makes the network predict few classes; slower.",
    "guided_epochs": "Rarely.",
    "elr_lambda": "Tune it for your dataset.",
    "elr_beta": "Tune it for your dataset.",
    "ramp_steps": "Rarely.",
    "forget_rate": "Set it to the noise rate, or an estimate of it.",
    "forget_epochs": "Rarely.",
    "temperature": "Closer to 1 if refined labels are confident and wrong.",
    "lambda_u": "0 with few wrong labels, 150 with half of them or more (100 classes).",
    "ramp_epochs": "Rarely.",
    "classifier_warmup": "Longer if the classifier has learned little when the warm-up ends.",
    "loss_epochs": "5 with very many wrong labels.",
    "warmup_penalty": "1 if wrong labels are mostly of one similar class.",
    "ensemble": "To predict with both networks, at twice the cost.",
    "entropy_weight": "Higher if the network is sure of almost nothing after the warm-up.",
    "as_released": "To repeat the released program.",
    "softening_temperature": "Higher to soften more targets.",
    "correct_above": "Lower if few images are out-of-distribution.",
    "warmup_mixup": "Off where most labels are noisy, as the authors do.",
    "main_batch_size": "Larger for speed.",
    "contrast_temperature": "Rarely.",
    "instance_weight": "Rarely.",
    "prototype_weight": "Lower if the loss becomes NaN or training is unstable.",
    "prototype_ramp": "Shorter in short runs.",
    "reconstruction_weight": "Rarely.",
    "keep_threshold": "Higher (0.4) with few classes or few images, where wrong labels are kept.",
    "use_threshold": "Lower if a notice says that few images are used.",
    "label_smoothing": "0.1 to 0.3 with ten classes.",
    "clean_threshold": "Lower if almost all labels are flagged.",
    "last_clean_threshold": "Lower if more and more labels are flagged.",
    "consistency": "Rarely.",
    "largest_divergence": "Larger, such as 1000000, to repeat the paper.",
    "image_size": "Larger for details, smaller for speed.",
    "pad": "0 if a shift would cut off what matters.",
    "flip": "Off if left and right matter: digits, text, signs.",
    "compare_metrics": "For the paper's plots.",
    "corrupt": "For experiments only.",
    "pool": "For experiments only.",
    "seed": "To repeat a run with other random numbers.",
    "device": "To choose a GPU, or the CPU.",
    "sync_norm": "Off for speed, if each of several processes has many images per step.",
    "precision": "float32 if bf16 may be the cause of a NaN.",
    "images": "files if memory is short.",
    "accelerate": "off or capture to look for a bug; full for timm networks.",
    # Options that are not settings.
    "test": "You have images with correct labels: only they give the true accuracy.",
    "hold_out": "0 to train on every image; more for a more precise accuracy.",
    "strict": "No file may be missing.",
    "follow_links": "You made the links yourself, as `pseudoloss apply` does.",
    "max_megabytes": "Your files are larger, and you trust them.",
    "max_megapixels": "Your images are larger, and memory suffices.",
    "fit": "stretch if what matters is at the edges of long images.",
    "path_column": "The column has another name; for `hf:NAME`, the image column.",
    "label_column": "The column has another name, or there are several.",
    "split_column": "The column has another name.",
    "out": "Always.",
    "preset": "To repeat an experiment, or to choose between finetune and scratch.",
    "config": "To reuse the settings of a run: `--config RUN/config.json`.",
    "resume": "A run was interrupted. It can always be given.",
    "minutes": "You have the machine for a limited time.",
    "time": "You know how long you can wait, but not how many epochs that is.",
    "checkpoint_every": "More if writing a large model takes long.",
    "quiet": "In scripts.",
    "log": "To watch runs elsewhere ([cluster.md](cluster.md#loggers)).",
}

READING = """## Reading folders and tables

Flags of `pseudoloss train` and `pseudoloss inspect`, keywords of `pl.train`. They belong to the
source, so presets and `--config` files do not have them; `config.json` records them beside the
source ([data.md](data.md)).
"""

COMMAND = """## The command

Arguments of `pseudoloss train`, keywords of `pl.train` (where `--time` is `time_budget`, in
minutes). `--time` plans as many epochs as fit, and the run ends by itself; `--minutes` stops a
longer run, and `--resume` continues it.
"""

TABLE = "| flag | default | meaning | when to change it |\n|---|---|---|---|"


def page() -> str:
    """The whole page."""
    described = {method: describe_settings(method) for method in METHOD_SETTINGS}
    every = set.intersection(*(set(names) for names in described.values()))
    first = next(iter(METHOD_SETTINGS))
    lines = [HEAD, SHARED, *_groups(first, every)]
    mixture = {field.name for field in fields(DetectionSettings)}
    without = [f"`{name}`" for name, names in described.items() if not mixture <= names.keys()]
    lines += [DETECTION.format(", ".join(without)), *_groups(first, mixture)]
    shared = every | mixture
    for method, names in described.items():
        lines.append(_title(method))
        own = (names.keys() - shared) | _other_defaults(method, shared)
        lines += _groups(method, own) if own else ["No settings of its own.\n"]
    options = [
        action
        for action in train_parser()._actions
        if action.dest not in ("help", "source") and not _is_setting(action, described)
    ]
    for head, is_reading in ((READING, True), (COMMAND, False)):
        chosen = [action for action in options if (action.dest in READ_OPTIONS) == is_reading]
        lines += [head, TABLE, *map(_option_row, chosen), ""]
    lines.append("## Presets\n\n| preset | changes | needs |\n|---|---|---|")
    for name, changes in PRESETS.items():
        text = " ".join(f"`{as_flag(key, value)}`" for key, value in changes.items())
        needed = f"`{NEEDS[name]}`" if name in NEEDS else "–"
        lines.append(f"| `{name}` | {text or 'nothing'} | {needed} |")
    return "\n".join(lines) + "\n"


def _title(method: str) -> str:
    title = TITLES.get(method, method)
    return f"## `--method {method}`" + ("\n" if title == method else f": {title}\n")


def _other_defaults(method: str, shared: set[str]) -> set[str]:
    """The shared settings whose default a method changes."""
    usual, own = (as_json(Settings(method=name)) for name in (next(iter(METHOD_SETTINGS)), method))
    return {name for name in shared & own.keys() - {"method"} if own[name] != usual[name]}


def _groups(method: str, names: Iterable[str]) -> list[str]:
    """A table for each group of settings, in their order."""
    defaults = as_json(Settings(method=method))
    tables: dict[str, list[str]] = {}
    for name, (group, text) in describe_settings(method).items():
        if name in names:
            row = f"| `{flag(name)}` | {as_text(defaults[name])} | {text} | {WHEN[name]} |"
            tables.setdefault(group, []).append(row)
    return [line for group, rows in tables.items() for line in (f"### {group}\n", TABLE, *rows, "")]


def _is_setting(action: Action, described: dict[str, dict[str, tuple[str, str]]]) -> bool:
    return any(action.dest in names for names in described.values())


def _option_row(action: Action) -> str:
    """An option that is not a setting, as its help describes it."""
    help_text = (action.help or "").replace("%%", "%")
    text, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", help_text).groups()
    value = action.default
    if value == SUPPRESS:
        value = READ_OPTIONS[action.dest].default
    meaning = f"{text[0].upper()}{text[1:]}."
    shown = default or as_text(value)
    return f"| `{action.option_strings[0]}` | {shown} | {meaning} | {WHEN[action.dest]} |"


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page(), encoding="utf-8")
