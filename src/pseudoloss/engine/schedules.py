"""Learning rates: one value per epoch."""

import math

from pseudoloss.config import Settings, parse_schedule


def learning_rate(settings: Settings, epoch: int) -> float:
    """Constant during the warm-up; then by the schedule of the settings. Epochs count from 0."""
    W, E = settings.warmup_epochs, settings.epochs
    steps = parse_schedule(settings.schedule)
    if steps is not None:
        epochs, factor = steps
        return settings.lr * factor ** sum(epoch >= start for start in epochs)
    if epoch < W or settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "linear":
        return settings.lr * (E - epoch) / (E - W + 1)
    return 0.5 * settings.lr * (1 + math.cos((epoch - W + 1) * math.pi / (E - W + 1)))  # row 15
