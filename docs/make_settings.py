"""Writes docs/settings.md from the settings themselves: python docs/make_settings.py"""

import re
from argparse import SUPPRESS, Action
from pathlib import Path

from pseudoloss.cli import train_parser
from pseudoloss.config import NEEDS, PRESETS, Settings, as_flag, as_text, describe_settings, flag
from pseudoloss.data import ReadOptions

HEAD = """# Settings

Every setting is a flag of `pseudoloss train`, a keyword of `pl.train` and a parameter of `pl.PLS`
(there with underscores). Values come from the preset (`--preset NAME`, or what fits the source),
then from a file (`--config FILE.toml`, with lines such as `epochs = 100`), then from flags. An
unknown name is an error. `pseudoloss presets NAME` shows every setting of a preset.

For images of your own some values are made to fit the data where you name none: the
batch size (at least eight steps an epoch; the learning rate goes with it), the prior of the class
balance (that of the given labels, where one class has twice the images of another), the image size
and normalisation (those of the network's weights), and for image files on a CPU, instead of
preactresnet18, a small network and 30 epochs. That holds for files with any preset, for arrays
without one. The run says what it uses, and `config.json` keeps it.

This page is written by `python docs/make_settings.py`.
"""

WHEN = {
    "method": "To see what PLS is worth on your data: train a baseline beside it.",
    "network": "Other sizes and speeds: small-cnn on a CPU, a larger timm model for more accuracy.",
    "weights": "Photographs: pretrained, or a file where there is no network. Else leave it.",
    "projection": "Hardly ever.",
    "epochs": "More for accuracy, fewer for time; or let `--time` choose.",
    "warmup": "Longer if a notice says that the warm-up ended at chance; shorter with pretrained "
    "weights, which learn wrong labels by heart soon.",
    "batch_size": "Smaller where memory ends (or `--accumulate`), larger on a large GPU.",
    "accumulate": "A batch does not fit into the memory of the GPU.",
    "lr": "Lower if the loss becomes NaN or the warm-up ends at chance.",
    "momentum": "Hardly ever.",
    "weight_decay": "Less for small sets and fine-tuning, more against overfitting.",
    "threshold": "Lower with very many wrong labels; higher if good labels are doubted.",
    "threshold_on": "For the paper's messages of stage 1.",
    "noise_metric": "capped-loss if a notice says that stage 1 swings, or at some 80% noise; the "
    "others for comparisons.",
    "gamma": "Nearer to 1 if guesses are certain and wrong.",
    "guess_norm": "For the paper's form.",
    "guess_mode": "For comparisons; eval with batches that are too small for statistics.",
    "weighting": "For the paper's form (together), or that of the program's other commit (own).",
    "trust_metric": "For comparisons.",
    "trust_threshold": "With `--trust-metric threshold`.",
    "mu": "Hardly ever.",
    "contrast_class": "For the paper's form.",
    "balance": "Lower if rare classes are predicted too often; 0 where shares are unknown.",
    "balance_prior": "Imbalanced classes: given. Chosen by itself for folders and tables.",
    "correct": "Ablation.",
    "contrast": "Ablation; off is quicker.",
    "trust_in_classification": "Ablation.",
    "trust_in_contrast": "Ablation.",
    "mixup": "Ablation; off where mixed images make no sense.",
    "image_size": "Larger for details, smaller for speed.",
    "pad": "0 where a shift would cut off what matters.",
    "flip": "Off where left and right matter: digits, text, signs.",
    "compare_metrics": "For the paper's figures.",
    "corrupt": "For experiments only.",
    "pool": "For experiments only.",
    "seed": "For other runs of the same; results differ a little.",
    "device": "Several GPUs, or a CPU on purpose.",
    "precision": "float32 if bf16 is suspected of a NaN.",
    "images": "files where memory is short; host or device to decide yourself.",
    "accelerate": "off or capture to look for a fault; full for timm networks.",
    # What is no setting.
    "test": "You have images whose labels are right: only they tell the accuracy itself.",
    "hold_out": "0 to train on every image; more for a firmer figure of accuracy.",
    "strict": "No file may be missing from what is trained on.",
    "fit": "stretch where what matters lies at the edges of long images.",
    "path_column": "The table calls it otherwise; of `hf:NAME`, the column of images.",
    "label_column": "The table calls it otherwise, or has several labels an image.",
    "split_column": "The table calls it otherwise.",
    "out": "Always: nothing is written elsewhere.",
    "preset": "To repeat an experiment of the paper, or to choose between finetune and scratch.",
    "config": "To use the settings of another run again: `--config RUN/config.json`.",
    "resume": "A run was stopped or killed. It is safe to give it always.",
    "minutes": "The machine is yours for so long only.",
    "time": "You know how long you will wait, and not how many epochs that is.",
    "checkpoint_every": "More where writing a large model every epoch takes time.",
    "quiet": "In scripts.",
}

READING = """## Folders and tables of images

How a source is read: flags of `pseudoloss train` and `pseudoloss inspect`, keywords of `pl.train`.
They belong to the source, not to the settings, so neither a preset nor a `--config` file has them;
`config.json` keeps them beside the source. [Data](data.md) tells more.
"""

COMMAND = """## The command itself

Words of `pseudoloss train`, keywords of `pl.train` (there `--time` is `time_budget`, in minutes).
`--time` and `--minutes` are not the same: `--time` plans as many epochs as fit, and the run ends by
itself; `--minutes` stops a run that is planned longer, and `--resume` goes on with it.
"""

TABLE = "| flag | default | meaning | when to touch it |\n|---|---|---|---|"


def page() -> str:
    """The whole page."""
    lines, current = [HEAD], ""
    for name, (group, text) in describe_settings().items():
        if group != current:
            lines.append(f"## {group}\n\n{TABLE}")
            current = group
        shown = as_text(getattr(Settings(), name))
        last = _is_last(name, group)
        row = f"| `{flag(name)}` | {shown} | {text} | {WHEN[name]} |"
        lines.append(row + ("\n" if last else ""))
    others = [
        action
        for action in train_parser(None)._actions
        if action.option_strings and action.dest not in (*describe_settings(), "help")
    ]
    for head, is_reading in ((READING, True), (COMMAND, False)):
        chosen = [action for action in others if hasattr(ReadOptions, action.dest) == is_reading]
        lines += [head, TABLE, *map(_row, chosen), ""]
    lines.append("## Presets\n\n| preset | changes | needs |\n|---|---|---|")
    for name, changes in PRESETS.items():
        text = " ".join(f"`{as_flag(key, value)}`" for key, value in changes.items())
        needed = f"`{NEEDS[name]}`" if name in NEEDS else "–"
        lines.append(f"| `{name}` | {text or 'nothing'} | {needed} |")
    return "\n".join(lines) + "\n"


def _row(action: Action) -> str:
    """An option that is no setting, as its help describes it."""
    text, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", action.help or "").groups()
    value = getattr(ReadOptions, action.dest) if action.default == SUPPRESS else action.default
    meaning = f"{text[0].upper()}{text[1:]}."
    shown = default or as_text(value)
    return f"| `{action.option_strings[0]}` | {shown} | {meaning} | {WHEN[action.dest]} |"


def _is_last(name: str, group: str) -> bool:
    names = [other for other, (its_group, _) in describe_settings().items() if its_group == group]
    return name == names[-1]


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page(), encoding="utf-8")
