"""PLS once more, as plainly as it can be written: an oracle for whole runs.

    python benchmarks/oracle.py cifar100:DIR --preset cifar100-id50 [--seed 1] [--precision fp16]
        [--minutes 9] [--set network=preactresnet18-released ...] [--out FILE.json]

Written from docs/paper-and-code.md, not from the package: torch's own layers, scikit-learn's
mixtures with their random start, guesses remembered whole, the last, incomplete batch trained on,
and on a GPU float16 with a scaled loss, all as in the released program. Nothing is compiled,
captured or fused. The package lends settings, data and views (each view is tested against
torchvision). So where this ends elsewhere than `run.py` by more than seeds do, one of the two is
wrong. It knows the method as released, and of the switches only contrast, contrast_class, balance
and, of noise_metric, the loss and the capped loss. With --minutes it stops in time, for good.
"""

import argparse
import math
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

import machine
from pseudoloss.config import OWN, Settings, as_flag, as_json, request
from pseudoloss.data import corrupt, open_source
from pseudoloss.engine.choices import choose_normalisation, choose_padding, choose_size
from pseudoloss.errors import InputError
from pseudoloss.experiments.cells import read_changes
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

HALVES = (2, 4, 6)  # blocks that halve the image
METRICS = ("loss", "capped-loss")
KNOWN = {
    *("network", "projection", "epochs", "warmup", "batch_size", "lr", "momentum", "weight_decay"),
    *("threshold", "noise_metric", "gamma", "mu", "contrast_class", "balance", "contrast"),
    *("image_size", "pad", "flip", "corrupt", "pool", "seed"),
}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, released: bool) -> None:
        super().__init__()
        self.released = released
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)])
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norms[0](x))
        shortcut = active if self.released else x
        if self.around is not None:
            shortcut = self.around(active)
        return self.conv2(F.relu(self.norms[1](self.conv1(active)))) + shortcut


def backbone(name: str, channels: int) -> tuple[nn.Sequential, int]:
    """Images to features; and how many features."""
    layers: list[nn.Module] = []
    if name == "small-cnn":
        widths = (channels, 32, 64, 128, 128)
        for i, stride in enumerate((1, 2, 1, 2)):
            conv = nn.Conv2d(widths[i], widths[i + 1], 3, stride, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(widths[i + 1]), nn.ReLU()]
    else:
        layers = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False)]
        if name != "preactresnet18":
            layers += [nn.BatchNorm2d(64), nn.ReLU()]
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        for i in range(8):
            stride = 2 if i in HALVES else 1
            layers.append(Block(widths[i], widths[i + 1], stride, name.endswith("released")))
        if name == "preactresnet18":
            layers += [nn.BatchNorm2d(512), nn.ReLU()]
    for layer in nn.Sequential(*layers).modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]


class Network(nn.Module):
    def __init__(self, settings: Settings, channels: int, classes: int) -> None:
        super().__init__()
        self.backbone, features = backbone(settings.network, channels)
        self.classify = nn.Linear(features, classes)
        self.project = nn.Linear(features, settings.projection)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x.contiguous(memory_format=torch.channels_last))
        return self.classify(features), F.normalize(self.project(features))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * F.log_softmax(logits.float(), 1)).sum(1)


def low_mode(values: Tensor) -> Tensor:
    """P(low mode), by scikit-learn (row 13)."""
    x = values.cpu().double().numpy()[:, None]
    x = (x - x.min()) / (x.max() - x.min())
    mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4).fit(x)
    low = mixture.predict_proba(x)[:, int(mixture.means_[:, 0].argmin())]
    return torch.from_numpy(low).float().to(values.device)


class Oracle:
    """One run: what is trained, and what is known of every image."""

    def __init__(self, source: str, settings: Settings, precision: str) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = open_source(source)
        train = corrupt(data.train, settings.corrupt, settings.seed, settings.pool)
        assert data.test is not None
        assert train.true_N is not None
        self.images, self.test_images = (
            part.images_NCHW.to(self.device) for part in (train, data.test)
        )
        self.given, self.test_labels = (part.given_N.to(self.device) for part in (train, data.test))
        self.wrong = (train.given_N != train.true_N).numpy()
        self.classes = len(train.classes)
        size = choose_size(train.size, settings, data.image_size)
        mean, std = (torch.tensor(v) for v in choose_normalisation(data, settings))
        self.views = Views(
            mean_C=mean.to(self.device),
            std_C=std.to(self.device),
            size=size,
            pad=choose_padding(size, settings),
            flip=settings.flip,
        )
        self.network = Network(settings, train.channels, self.classes).to(
            self.device, memory_format=torch.channels_last
        )
        self.optimiser = torch.optim.SGD(
            self.network.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.half = {"fp16": torch.float16, "bf16": torch.bfloat16, "float32": None}[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        count = len(self.images)
        self.noisy = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.trust = torch.ones(count, device=self.device)
        self.guesses = F.one_hot(self.given, self.classes).float()
        self.loss, self.pseudo_loss = torch.zeros(2, count, device=self.device)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, self.half, enabled=self.half is not None)

    def epoch(self, epoch: int) -> float:
        """Row 11. Test accuracy after it."""
        settings, warm_up = self.settings, epoch < self.settings.warmup_epochs
        if epoch > settings.warmup_epochs and self.noisy.sum() > 2:
            self.trust.fill_(1)
            self.trust[self.noisy] = low_mode(self.pseudo_loss[self.noisy])
        self.train(epoch, warm_up)
        if epoch >= settings.warmup_epochs - 1:
            self.track()
            self.noisy = 1 - low_mode(self.judged()) > settings.threshold
        return self.accuracy()

    def judged(self) -> Tensor:
        """What stage 1 looks at."""
        if self.settings.noise_metric == "capped-loss":
            return self.loss.clamp(max=math.log(self.classes))
        return self.loss

    def train(self, epoch: int, warm_up: bool) -> None:
        settings = self.settings
        W, E = settings.warmup_epochs, settings.epochs
        rate = settings.lr
        if not warm_up:
            rate *= 0.5 * (1 + math.cos((epoch - W + 1) * math.pi / (E - W + 1)))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.network.train()
        order = torch.randperm(len(self.images), device=self.device)
        for index in order.split(settings.batch_size):
            if len(index) < 2:
                continue  # has no batch statistics
            loss = self.loss_of(index, warm_up)
            self.optimiser.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimiser)
            self.scaler.update()

    def loss_of(self, index: Tensor, warm_up: bool) -> Tensor:
        images, size = self.images[index], len(index)
        first, second = (
            self.views.weak(images, torch.rand(size, WEAK_DRAWS, device=self.device))
            for _ in range(2)
        )
        target = F.one_hot(self.given[index], self.classes).float()
        w = torch.ones(size, device=self.device)
        if not warm_up:
            guess = self.guess(first, second)
            self.guesses[index] = guess
            noisy = self.noisy[index]
            target[noisy] = guess[noisy]
            w[noisy] = self.trust[index][noisy]
        lam = torch.rand(()).item()
        lam = max(lam, 1 - lam)
        partner = torch.randperm(size, device=self.device)
        with self.autocast():
            logits, weak = self.network(lam * first + (1 - lam) * first[partner])
        own, partners = (cross_entropy(logits, t) for t in (target, target[partner]))
        if warm_up:
            return (lam * own + (1 - lam) * partners).mean()
        other_w = w[partner]
        loss = lam * (own * w).sum() / w.sum()
        loss = loss + (1 - lam) * (partners * other_w).sum() / other_w.sum()
        if self.settings.balance:
            mean = F.softmax(logits.float(), 1).mean(0)
            loss = loss - self.settings.balance * (mean.log() + math.log(self.classes)).mean()
        if self.settings.contrast:
            draws = torch.rand(size, STRONG_DRAWS, device=self.device)
            loss = loss + self.contrast(
                weak, self.views.strong(images, draws), target, w, partner, lam
            )
        return loss

    @torch.no_grad()
    def guess(self, first: Tensor, second: Tensor) -> Tensor:
        """In training mode: batch statistics count, and the running ones move (row 12)."""
        with self.autocast():
            mean = sum(F.softmax(self.network(x)[0].float(), 1) for x in (first, second)) / 2
        sharp = mean**self.settings.gamma
        return sharp / sharp.sum(1, keepdim=True)

    def contrast(
        self, weak: Tensor, strong: Tensor, target: Tensor, w: Tensor, partner: Tensor, lam: float
    ) -> Tensor:
        with self.autocast():
            logits = weak @ self.network(strong)[1].T / self.settings.mu
        of = target
        if self.settings.contrast_class == "mixed":
            of = lam * target + (1 - lam) * target[partner]
        label = F.one_hot(of.argmax(1), self.classes).float()
        label = torch.cat([w[:, None] * label, torch.diag(1 - w)], 1)
        alike = label @ label.T
        alike = lam * alike + (1 - lam) * alike[partner]
        return (cross_entropy(logits, alike) / alike.sum(1)).mean()

    @torch.no_grad()
    def track(self) -> None:
        """In single precision."""
        self.network.eval()
        for part in torch.arange(len(self.images), device=self.device).split(1000):
            logits, _ = self.network(self.views.plain(self.images[part]))
            self.loss[part] = F.cross_entropy(logits, self.given[part], reduction="none")
            self.pseudo_loss[part] = cross_entropy(logits, self.guesses[part])

    @torch.no_grad()
    def accuracy(self) -> float:
        self.network.eval()
        right = 0
        pairs = zip(self.test_images.split(1000), self.test_labels.split(1000), strict=True)
        for images, labels in pairs:
            right += int((self.network(self.views.plain(images))[0].argmax(1) == labels).sum())
        return 100 * right / len(self.test_labels)

    def detection(self) -> dict[str, float]:
        found = self.noisy.cpu().numpy()
        return {
            "precision": float(self.wrong[found].mean()) if found.any() else math.nan,
            "recall": float(found[self.wrong].mean()),
            "auc": float(roc_auc_score(self.wrong, self.loss.cpu().numpy())),
        }


def settings_of(preset: str, changes: dict[str, Any]) -> Settings:
    settings = request(preset, None, changes).settings(preset)
    usual, asked = as_json(Settings()), as_json(settings)
    for name, value in asked.items():
        if name not in KNOWN and value != usual[name]:
            raise InputError(f"{as_flag(name, value)}: the oracle knows no {name}")
    if settings.noise_metric not in METRICS:
        raise InputError(
            f"--noise-metric {settings.noise_metric}: the oracle knows {', '.join(METRICS)}"
        )
    if settings.network not in OWN:
        raise InputError(f"--network {settings.network}: the oracle knows {', '.join(OWN)}")
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--precision", choices=["fp16", "bf16", "float32"])
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    start = time.monotonic()
    precision = args.precision or ("fp16" if torch.cuda.is_available() else "float32")
    try:
        settings = settings_of(args.preset, read_changes(args.set) | {"seed": args.seed})
        oracle = Oracle(args.source, settings, precision)
    except InputError as error:
        parser.error(str(error))
    accuracies: list[float] = []
    noisy: list[float] = []
    for epoch in range(settings.epochs):
        accuracies.append(round(oracle.epoch(epoch), 2))
        noisy.append(round(oracle.noisy.float().mean().item(), 4))
        seconds = time.monotonic() - start
        shown = f"accuracy {accuracies[-1]:5.2f}  noisy {noisy[-1]:.3f}"
        print(f"{epoch + 1:3}  {shown}  {seconds:.0f} s", flush=True)
        if args.minutes and seconds * (epoch + 2) / (epoch + 1) > 60 * args.minutes:
            break
    best = max(range(len(accuracies)), key=accuracies.__getitem__)
    found = {
        "settings": machine.published(as_json(settings)) | {"precision": precision},
        "oracle": {
            "seed": args.seed,
            "epochs": len(accuracies),
            "seconds": round(time.monotonic() - start, 1),
            "accuracy": {
                "last": accuracies[-1],
                "best": accuracies[best],
                "best_epoch": best + 1,
            },
            "detection": oracle.detection(),
            "accuracy_by_epoch": accuracies,
            "noisy_by_epoch": noisy,
        },
    }
    places = {args.source: machine.without_place(args.source)}
    if settings.pool is not None:
        places |= {word: f"pool={Path(settings.pool).name}" for word in args.set if "pool" in word}
    machine.write(args.out, found, places)


if __name__ == "__main__":
    main()
