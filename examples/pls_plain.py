"""PLS (Pseudo-Loss Selection) in one file: train an image classifier on noisy labels.

    python examples/pls_plain.py                # about a minute on a CPU
    python examples/pls_plain.py --noise 0.6 --epochs 40 --seed 2

It needs torch, torchvision, scikit-learn and NumPy, and nothing of the pseudoloss package. It
trains on scikit-learn's digits with 40% wrong labels, once with cross-entropy and once with PLS,
and prints the accuracy of both on clean test images.

The method (Albert et al., "Is your noise correction noisy?", WACV 2023):

    warm-up   train with mixup on the given labels; images with a wrong label keep a high loss
    stage 1   fit two Gaussians to the loss of all images: those in the high mode are noisy
    correct   replace each noisy label by a pseudo-label from two weak views
    stage 2   fit two Gaussians to the pseudo-loss: P(low mode) is w, the trust in a pseudo-label
    train     classification loss weighted by w, contrastive loss guided by w, class balance

Start at `train_pls`: it is Algorithm 1, and the functions below it are its steps. The package has
the same steps in src/pseudoloss/methods/.

    to change                        edit here                      in the package
    how noisy labels are found       detect_noise (stage 1)         detection.py: LossDetector.flag
    how labels are corrected         make_pseudo_labels             pls.py: make_pseudo_labels
    how far corrections are trusted  trust_pseudo_labels (stage 2)  pls.py: stage2, trust_by_mixture
    the losses                       classification_loss,           pls.py: functions of these
                                     contrastive_loss,              names, and PLS.loss
                                     class_balance
    the data or the views            load_noisy_digits, WEAK,       data/ and nn/views.py
                                     STRONG

Where the paper and the authors' released program differ, this file follows the program. "Row n" is
a row of docs/paper-and-code.md, which lists the differences.

Shapes: N images in the set, B in a batch, C classes, D dimensions of the contrastive space.
"""

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchvision.transforms import v2

C, D = 10, 64
BATCH_SIZE, LR, MOMENTUM, WEIGHT_DECAY = 32, 0.05, 0.9, 5e-4
WARMUP_SHARE = 0.15  # of the epochs; the paper: 30 of 200
THRESHOLD = 0.95  # of stage 1
GAMMA = 2.0  # sharpens the pseudo-label
MU = 0.2  # temperature of the contrastive loss

Mixing = tuple[Tensor, float]  # mixup: the partner of each image in the batch, and lambda


@dataclass
class Data:
    images_N: Tensor  # N×1×8×8, from 0 to 1
    given_N: Tensor  # the labels to train on; some are wrong
    true_N: Tensor  # for evaluation only
    test_images: Tensor
    test_labels: Tensor  # clean


@dataclass
class Result:
    accuracy: list[float]  # on the test images, one value per epoch
    noisy_N: Tensor  # stage 1: True where the given label is flagged as noisy
    pseudo_NC: Tensor  # pseudo-labels, as probabilities
    trust_N: Tensor  # stage 2: w


def main() -> None:
    parser = argparse.ArgumentParser(description="PLS beside cross-entropy on noisy digits.")
    parser.add_argument("--noise", type=float, default=0.4, help="share of wrong labels")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - the mixtures of scikit-learn start from it

    data = load_noisy_digits(args.noise, args.seed)
    ce_accuracy = train_cross_entropy(data, args.epochs)
    pls = train_pls(data, args.epochs)

    wrong_N, noisy_N = data.given_N != data.true_N, pls.noisy_N
    right_N = pls.pseudo_NC.argmax(1) == data.true_N
    trusted_N = noisy_N & (pls.trust_N >= 0.5)
    print(f"\nTest accuracy after the last epoch ({wrong_N.float().mean():.0%} wrong labels)")
    print(f"  cross-entropy {ce_accuracy[-1]:6.1f}%")
    print(f"  PLS           {pls.accuracy[-1]:6.1f}%")
    print(
        f"Stage 1 flags {share(wrong_N, noisy_N)} of the wrong labels as noisy; "
        f"{share(noisy_N, wrong_N)} of the flagged labels are wrong."
    )
    print(
        f"Of the flagged images, {share(noisy_N, right_N)} have the right pseudo-label; "
        f"of those that stage 2 trusts (w >= 0.5), {share(trusted_N, right_N)}."
    )


def share(of_N: Tensor, hit_N: Tensor) -> str:
    return f"{(of_N & hit_N).sum() / of_N.sum().clamp(min=1):.1%}"


# ---------------------------------------------------------------------------- Algorithm 1


def train_pls(data: Data, epochs: int) -> Result:
    N, warmup = len(data.given_N), max(1, round(WARMUP_SHARE * epochs))
    network = Network()
    optimizer = make_optimizer(network)
    noisy_N = torch.zeros(N, dtype=torch.bool)
    trust_N = torch.ones(N)
    pseudo_NC = F.one_hot(data.given_N, C).float()
    accuracy: list[float] = []

    for epoch in range(epochs):
        set_learning_rate(optimizer, epoch, epochs, warmup)
        network.train()
        for index_B in batches(N):
            images_B = data.images_N[index_B]
            target_BC = F.one_hot(data.given_N[index_B], C).float()
            first, second = augment(WEAK, images_B), augment(WEAK, images_B)
            mixing = draw_mixing(len(index_B))

            if epoch < warmup:  # mixup on the given labels
                logits_BC, _ = network(mix(first, mixing))
                loss = cross_entropy(logits_BC, mix(target_BC, mixing)).mean()
            else:  # correct the noisy labels, then train on them as far as they are trusted
                pseudo_BC = make_pseudo_labels(network, first, second)
                pseudo_NC[index_B] = pseudo_BC
                target_BC = torch.where(noisy_N[index_B, None], pseudo_BC, target_BC)
                w_B = trust_N[index_B]
                logits_BC, weak_BD = network(mix(first, mixing))
                _, strong_BD = network(augment(STRONG, images_B))
                loss = (
                    classification_loss(logits_BC, target_BC, w_B, mixing)
                    + contrastive_loss(weak_BD, strong_BD, target_BC, w_B, mixing)
                    + class_balance(logits_BC)
                )
            update(optimizer, loss)

        # As released (row 11): the first flags come after the last warm-up epoch, the first trust
        # one epoch later, when there are pseudo-labels to judge.
        if epoch >= warmup - 1:
            logits_NC = predict(network, data.images_N)
            noisy_N = detect_noise(F.cross_entropy(logits_NC, data.given_N, reduction="none"))
        if epoch >= warmup:
            pseudo_loss_N = cross_entropy(logits_NC, pseudo_NC)  # Eq. 2
            trust_N = trust_pseudo_labels(pseudo_loss_N, noisy_N)
        accuracy.append(measure_accuracy(network, data))
        flagged = noisy_N.float().mean()
        print(
            f"PLS epoch {epoch + 1}: accuracy {accuracy[-1]:.1f}%, {flagged:.0%} flagged as noisy"
        )
    return Result(accuracy, noisy_N, pseudo_NC, trust_N)


def train_cross_entropy(data: Data, epochs: int) -> list[float]:
    """The baseline: same network, views and schedule, but it trains on every given label."""
    warmup = max(1, round(WARMUP_SHARE * epochs))
    network = Network()
    optimizer = make_optimizer(network)
    accuracy: list[float] = []
    for epoch in range(epochs):
        set_learning_rate(optimizer, epoch, epochs, warmup)
        network.train()
        for index_B in batches(len(data.given_N)):
            logits_BC, _ = network(augment(WEAK, data.images_N[index_B]))
            update(optimizer, F.cross_entropy(logits_BC, data.given_N[index_B]))
        accuracy.append(measure_accuracy(network, data))
        print(f"cross-entropy epoch {epoch + 1}: accuracy {accuracy[-1]:.1f}%")
    return accuracy


# ------------------------------------------------ Sections 3.1, 3.2.1 and 3.2.2: the stages


def detect_noise(loss_N: Tensor) -> Tensor:
    """Stage 1: noisy if the loss is in the high mode with a probability above 0.95 (row 2)."""
    return 1 - low_mode(loss_N) > THRESHOLD


@torch.no_grad()
def make_pseudo_labels(network: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """Eq. 1: the mean prediction of two weak views to the power gamma, normalised (row 3).

    The network stays in training mode, so batch norm uses the statistics of the batch (row 12).
    """
    mean_BC = (network(first)[0].softmax(1) + network(second)[0].softmax(1)) / 2
    sharp_BC = mean_BC**GAMMA
    return sharp_BC / sharp_BC.sum(1, keepdim=True)


def trust_pseudo_labels(pseudo_loss_N: Tensor, noisy_N: Tensor) -> Tensor:
    """Stage 2: w is P(low mode) of the pseudo-loss; 1 for images that are not noisy."""
    trust_N = torch.ones(len(noisy_N))
    if noisy_N.sum() > 2:
        trust_N[noisy_N] = low_mode(pseudo_loss_N[noisy_N])
    return trust_N


def low_mode(value_N: Tensor) -> Tensor:
    """P(low mode) in a mixture of two Gaussians, fitted in at most ten steps (row 13)."""
    x = value_N.double().numpy()[:, None]
    x = (x - x.min()) / max(x.max() - x.min(), 1e-12)
    mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4).fit(x)
    low_N = mixture.predict_proba(x)[:, mixture.means_[:, 0].argmin()]
    return torch.tensor(low_N, dtype=torch.float32)


# ---------------------------------------------------- Sections 3.2.2 to 3.2.4: the losses


def cross_entropy(logits_BC: Tensor, target_BC: Tensor) -> Tensor:
    return -(target_BC * F.log_softmax(logits_BC, 1)).sum(1)


def draw_mixing(B: int) -> Mixing:
    """One lambda per batch, at least 0.5 (row 5). Both losses use it (row 6)."""
    lam = torch.rand(()).item()
    return torch.randperm(B), max(lam, 1 - lam)


def mix(x_B: Tensor, mixing: Mixing) -> Tensor:
    partner_B, lam = mixing
    return lam * x_B + (1 - lam) * x_B[partner_B]


def classification_loss(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor, mixing: Mixing
) -> Tensor:
    """Eq. 3: cross-entropy of the mixed images, weighted by w: one term for each image and one for
    its partner. Both have the same sum of weights, since partners are a permutation (row 4)."""
    partner_B, lam = mixing
    own_B = w_B * cross_entropy(logits_BC, target_BC)
    partner_loss_B = w_B[partner_B] * cross_entropy(logits_BC, target_BC[partner_B])
    return (lam * own_B.sum() + (1 - lam) * partner_loss_B.sum()) / w_B.sum().clamp(min=1e-12)


def contrastive_loss(
    weak_BD: Tensor, strong_BD: Tensor, target_BC: Tensor, w_B: Tensor, mixing: Mixing
) -> Tensor:
    """Eq. 4 to 7: a trusted image should resemble its class, any other image only itself."""
    P_BB = weak_BD @ strong_BD.T / MU  # Eq. 4
    class_BC = F.one_hot(mix(target_BC, mixing).argmax(1), C).float()  # row 8
    # Eq. 6: class and position in the batch, so X is C + B.
    label_BX = torch.cat([w_B[:, None] * class_BC, torch.diag(1 - w_B)], dim=1)
    L_BB = mix(label_BX @ label_BX.T, mixing)  # only the weak views are mixed (row 7)
    return (cross_entropy(P_BB, L_BB) / L_BB.sum(1)).mean()  # Eq. 5 and 7 (row 9)


def class_balance(logits_BC: Tensor) -> Tensor:
    """KL(uniform || mean prediction of the batch): keeps every class in use (row 14)."""
    return -(logits_BC.softmax(1).mean(0).log() + math.log(C)).mean()


# ------------------------------------------------------------------------- data and views


def load_noisy_digits(noise: float, seed: int) -> Data:
    """1,797 digits of 8×8 pixels, a fifth of them for testing. `noise` is the share of the other
    labels that is moved to a wrong class."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    train_images, test_images, true, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    rng = np.random.default_rng(seed)
    given = true.copy()
    wrong = rng.permutation(len(given))[: round(noise * len(given))]
    given[wrong] = (given[wrong] + rng.integers(1, C, len(wrong))) % C
    return Data(*map(torch.from_numpy, (train_images, given, true, test_images, test_labels)))


# A digit fills its image and has a direction, so WEAK changes nothing here: both weak views are the
# image itself. With padding=1 cross-entropy memorises fewer wrong labels, so the gap to PLS is
# smaller. For photographs, pad by an eighth of the size and add RandomHorizontalFlip to both views
# (row 21); add saturation 0.4, hue 0.1 and RandomGrayscale(0.2) to the strong view (row 22).
WEAK = v2.RandomCrop(8, padding=0)
STRONG = v2.Compose([v2.RandomResizedCrop(8, scale=(0.5, 1)), v2.ColorJitter(0.4, 0.4)])


def augment(view: nn.Module, images_B: Tensor) -> Tensor:
    return torch.stack([view(image) for image in images_B])  # random for each image


# ------------------------------------------------------------------ network and optimizer


class Network(nn.Module):
    """A small CNN. It returns logits and L2-normalised projections into the contrastive space."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 2)):
            conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(64, C)
        self.projection = nn.Linear(64, D)

    def forward(self, images_B: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone((images_B - 0.3) / 0.38)  # mean and standard deviation of digits
        return self.classifier(features), F.normalize(self.projection(features))


def make_optimizer(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)


def set_learning_rate(optimizer: torch.optim.SGD, epoch: int, epochs: int, warmup: int) -> None:
    """Constant during the warm-up, then a cosine (row 15)."""
    done = max(0, epoch - warmup + 1) / (epochs - warmup + 1)
    optimizer.param_groups[0]["lr"] = 0.5 * LR * (1 + math.cos(math.pi * done))


def batches(N: int) -> list[Tensor]:
    """A random order, in batches. The last, incomplete one is left out."""
    return list(torch.randperm(N)[: N - N % BATCH_SIZE].split(BATCH_SIZE))


def update(optimizer: torch.optim.SGD, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def predict(network: nn.Module, images_N: Tensor) -> Tensor:
    """Logits of the images without augmentation, in evaluation mode."""
    network.eval()
    return torch.cat([network(images_B)[0] for images_B in images_N.split(500)])


def measure_accuracy(network: nn.Module, data: Data) -> float:
    right_N = predict(network, data.test_images).argmax(1) == data.test_labels
    return 100 * right_N.float().mean().item()


if __name__ == "__main__":
    main()
