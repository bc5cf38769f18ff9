"""Ways to make the label table of `pseudoloss train`, compared on labels that we made wrong.

    python benchmarks/train_table.py [cifar100:DIR] [--work DIR] [--quick] [--out FILE.json]

Trains on digits and, with a source, on 2,000 of its images (10 classes, halved to 16 pixels), with
a tenth of the images held out. Predictions of every epoch are kept (in --work, if given, so that a
second call trains nothing). Then the labels are judged in six ways:

    flags        the method's own: a two-mode mixture of the loss, as in version 0.2
    final        the latent-label model, fitted to the final predictions for the training images
    mean         the same for predictions averaged over the epochs
    held-out final, held-out
                 rate and temperature from the held-out images; the last one is what `train` does
    test         what `train` does without held-out images: here those images have their true labels
                 and are test images

Reported for each: F1 of "this label is wrong", AUC of the score, expected calibration error (ten
bins), estimated noise rate and interval (for `test`, also whether it is said to be known), share of
right suggestions, share of right labels before and after relabelling.

--only WORDS runs the cases whose names contain one of these words, such as digits-ce.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import machine
from pseudoloss.data import Data, arrays, corrupt, open_source
from pseudoloss.data.images import with_held_out
from pseudoloss.engine.history import POWER
from pseudoloss.engine.label_scores import label_scores
from pseudoloss.engine.trainer import Trainer
from pseudoloss.inference.passes import predict
from pseudoloss.labels.decisions import is_trusted
from pseudoloss.methods import label_scores as ls
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter
from pseudoloss.scores import auc

SEED, SHARE = 1, 0.1
DIGITS = (
    *(("pls", noise, 30) for noise in ("symmetric-exact:0.4", "symmetric-exact:0.1", "none")),
    *((method, "symmetric-exact:0.4", 30) for method in ("ce", "mixup", "elr", "co-teaching")),
    ("ce", "symmetric-exact:0.1", 30),
    *(("pls", noise, 5) for noise in ("symmetric-exact:0.4", "symmetric-exact:0.1")),
    *((method, "asymmetric-blocks:0.3", 15) for method in ("pls", "ce")),
)
PHOTOS = (
    ("pls", "symmetric-exact:0.3", 10),
    ("pls", "symmetric-exact:0.3", 30),
    *(("pls", noise, 15) for noise in ("none", "symmetric-exact:0.1", "symmetric-exact:0.5")),
    ("ce", "symmetric-exact:0.3", 30),
    *(("ce", noise, 15) for noise in ("none", "symmetric-exact:0.1")),
    ("elr", "symmetric-exact:0.3", 15),
)
QUICK = (("pls", "symmetric-exact:0.4", 2),)


def small_photos(source: str, classes: int = 10, images: int = 2000) -> Data:
    every = open_source(source).train
    assert isinstance(every.images_NCHW, Tensor)
    random, given = np.random.default_rng(0), every.given_N.numpy()
    chosen = np.sort(random.permutation(len(every.classes))[:classes])
    members = [random.permutation(np.flatnonzero(given == c))[: images // classes] for c in chosen]
    rows = np.concatenate(members)
    pixels = every.images_NCHW.numpy()[rows]
    N, C, H, W = pixels.shape
    halved = pixels.reshape(N, C, H // 2, 2, W // 2, 2).mean((3, 5)).round().astype(np.uint8)
    labels = np.searchsorted(chosen, given[rows])
    return arrays(halved.transpose(0, 2, 3, 1), labels, classes=[every.classes[c] for c in chosen])


def record(data: Data, preset: str, **settings: Any) -> dict[str, np.ndarray]:
    """Train, and keep the predictions after every epoch and the method's own verdict."""
    chosen = request(preset, None, settings | {"seed": SEED, "device": "cpu"}).settings(preset)
    found: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    assert data.test is not None
    assert data.test.true_N is not None
    tested = replace(data, test=replace(data.test, given_N=data.test.true_N), noisy_test=False)
    with Trainer(tested, chosen, SilentReporter()) as trainer:
        for epoch in range(chosen.epochs):
            trainer.train_epoch(epoch)
            if trainer.method.scores_after(epoch):
                trainer.score(epoch)
            for part, images in (("train", trainer.images), ("held_out", trainer.test_images)):
                logits = torch.cat(list(predict(trainer.model.network, trainer.views, images)))
                found[part].append(logits.float().log_softmax(1).numpy())
            trainer.store_predictions(epoch)
            trainer.add_predictions(None)
        table, noise = label_scores(trainer)
        verdict = trainer.verdict(chosen.epochs - 1)
        suggested_N, trust_N = verdict.suggested_N, verdict.trust_N
        if suggested_N is None or trust_N is None:  # no suggestion
            suggested_N, trust_N = torch.full_like(verdict.predicted_N, -1), 0 * verdict.loss_N
        own = (verdict.noisy_N, verdict.p_noisy_N, verdict.loss_N, suggested_N, trust_N)
        names = ("noisy", "p_noisy", "loss", "suggested", "trust")
        kept = dict(zip(names, (value.cpu().numpy() for value in own), strict=True))
    number = {name: i for i, name in enumerate(data.train.classes)}
    judged = {f"test_{name}": table[name].to_numpy() for name in ("p_noisy", "trust")}
    judged["test_candidate"] = table["candidate_label"].map(number).to_numpy()
    judged["test_score"] = table["label_score"].to_numpy()
    judged["test_rate"] = np.array([noise["rate"], noise["low"], noise["high"]])
    judged["test_known"] = np.array(noise["known"])
    assert data.train.true_N is not None
    return (
        kept
        | judged
        | {
            "train": np.stack(found["train"]),
            "held_out": np.stack(found["held_out"]),
            "given": data.train.given_N.numpy(),
            "true": data.train.true_N.numpy(),
            "held_out_given": data.test.given_N.numpy(),
        }
    )


def calibration_error(p: np.ndarray, hit: np.ndarray, bins: int = 10) -> float:
    bin_N = np.minimum((p * bins).astype(int), bins - 1)
    sums = [np.bincount(bin_N, values, minlength=bins) for values in (p, hit.astype(float))]
    return float(np.abs(sums[0] - sums[1]).sum() / len(p))


def measure(
    run: dict[str, np.ndarray],
    flagged: np.ndarray,
    p_noisy: np.ndarray,
    score: np.ndarray,
    candidate: np.ndarray,
    trust: np.ndarray,
    noise: tuple[float, float | None, float | None],
) -> dict[str, Any]:
    given, true = run["given"], run["true"]
    wrong = given != true
    moved = flagged & is_trusted(p_noisy, trust)
    right = int((candidate == true)[moved].sum())
    after = np.where(moved, candidate, given)
    numbers = {
        "f1": 2 * int((flagged & wrong).sum()) / max(int(flagged.sum() + wrong.sum()), 1),
        "auc": auc(torch.from_numpy(score), torch.from_numpy(wrong)),
        "calibration_error": calibration_error(p_noisy, wrong),
        "rate": noise[0],
        "low": noise[1],
        "high": noise[2],
        "flagged": float(flagged.mean()),
        "suggestions": int(moved.sum()),
        "suggestions_right": right / int(moved.sum()) if moved.any() else None,
        "labels_right_before": float((given == true).mean()),
        "labels_right_after": float((after == true).mean()),
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}


def ways(run: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    given_N, held_M = (torch.from_numpy(run[name]) for name in ("given", "held_out_given"))
    accuracy_E = (run["held_out"].argmax(2) == run["held_out_given"]).mean(1)
    weight_E = np.maximum(accuracy_E, 0.01) ** POWER
    weight_E = weight_E / weight_E.sum()
    mean, final = (
        [torch.from_numpy(np.tensordot(weights, run[part], 1)).float() for part in run_parts]
        for weights, run_parts in (
            (weight_E, ("train", "held_out")),
            (np.eye(len(weight_E))[-1], ("train", "held_out")),
        )
    )
    issue = run["noisy"] & ~((run["trust"] >= 0.5) & (run["suggested"] == run["given"]))
    suggested = np.where(run["suggested"] < 0, run["given"], run["suggested"])
    rate = (float(issue.mean()), None, None)
    scores = (issue, run["p_noisy"], run["loss"], suggested, run["trust"])
    found = {"flags": measure(run, *scores, rate)}
    for name, (log_prob, held_log_prob), own in (
        ("final", final, True),
        ("mean", mean, True),
        ("held-out final", final, False),
        ("held-out", mean, False),
    ):
        flips = ls.count_flips(log_prob, given_N)
        fitted = (log_prob, given_N) if own else (held_log_prob, held_M)
        noise = ls.estimate_noise(*fitted, flips)
        evidence = ls.weigh(log_prob, given_N, noise)
        shift = 0.0 if own else ls.matching_shift(evidence.log_odds_B, noise.rate)
        p_noisy = ls.probability_wrong(evidence.log_odds_B, shift).numpy()
        loss = -log_prob.gather(1, given_N[:, None])[:, 0].numpy()
        trust = p_noisy * evidence.share_B.numpy()
        scores = (p_noisy >= 0.5, p_noisy, loss, evidence.candidate_B.numpy(), trust)
        found[name] = measure(run, *scores, (noise.rate, noise.low, noise.high))
    own = [run[f"test_{name}"] for name in ("p_noisy", "score", "candidate", "trust", "rate")]
    p_noisy, score, candidate, trust, noise_3 = own
    rates = tuple(noise_3.tolist())
    found["test"] = measure(run, p_noisy >= 0.5, p_noisy, -score, candidate, trust, rates)
    found["test"]["known"] = bool(run["test_known"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="cifar100:DIR, for small photographs")
    parser.add_argument("--work", type=Path, help="keep predictions here")
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of cases")
    parser.add_argument("--quick", action="store_true", help="one run of two epochs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plan = [("digits", case) for case in (QUICK if args.quick else DIGITS)]
    plan += [("photos", case) for case in PHOTOS if args.source and not args.quick]
    cases = []
    for kind, (method, noise, epochs) in plan:
        name = f"{kind}-{method}-{noise.replace(':', '-')}-{epochs}"
        if not any(word in name for word in args.only):
            continue
        file = args.work / f"{name}.npz" if args.work else None
        if file and file.exists():
            run = dict(np.load(file, allow_pickle=False))
        else:
            digits = kind == "digits"
            whole = open_source("digits") if digits else small_photos(args.source)
            given = "symmetric-exact:0" if noise == "none" else noise
            noisy = corrupt(whole.train, given, SEED)
            data = with_held_out(replace(whole, train=noisy, test=None), SHARE, SEED)
            settings = {} if digits else {"network": "small-cnn", "batch_size": 64}
            preset = "digits" if digits else "scratch"
            run = record(data, preset, method=method, epochs=epochs, **settings)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                np.savez_compressed(file, **run)
        wrong = float((run["given"] != run["true"]).mean())
        case = {"source": kind, "method": method, "noise": noise, "epochs": epochs}
        cases.append(case | {"wrong": round(wrong, 4), "ways": ways(run)})
        print(f"{kind}, {method}, {noise}, {epochs} epochs: {wrong:.1%} wrong")
        for way, row in cases[-1]["ways"].items():
            print(
                f"  {way:15} F1 {row['f1']:.3f}  AUC {row['auc'] or float('nan'):.3f}  "
                f"ECE {row['calibration_error']:.3f}  rate {row['rate']:.3f}  labels right "
                f"{row['labels_right_before']:.3f} -> {row['labels_right_after']:.3f}"
            )
    folders = {str(args.work): "WORK"} if args.work else {}
    if args.source:
        folders[args.source] = machine.without_place(args.source)
    machine.write(args.out, {"seed": SEED, "held_out": SHARE, "cases": cases}, folders)


if __name__ == "__main__":
    main()
