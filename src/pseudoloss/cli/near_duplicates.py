"""Pictures that look alike although their pixels differ: resized, recompressed, slightly edited.

A difference hash has one bit for each pair of neighbouring pixels of a thumbnail: which of them is
brighter. Near duplicates differ in few bits.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL import Image

SIDE = 8  # 64 bits for horizontal neighbours, 64 for vertical ones
BITS = 2 * SIDE * SIDE
MOST_DIFFERENT = 6  # bits
FLATTEST = 4.0  # standard deviation of the thumbnail below which an image has no hash
CROWDED = 200  # images that share a band of bits; more say nothing


def difference_hash(image: Image.Image) -> bytes:
    """128 bits; empty for an image without contrast, whose bits would be noise."""
    grey = image.convert("L").resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX)
    pixels = np.asarray(grey, dtype=np.int16)
    if pixels.std() < FLATTEST:
        return b""
    across, down = pixels[:SIDE, 1:] > pixels[:SIDE, :-1], pixels[1:, :SIDE] > pixels[:-1, :SIDE]
    return np.packbits(np.concatenate([across.ravel(), down.ravel()])).tobytes()


def near_groups(hashes: Sequence[bytes]) -> list[list[int]]:
    """Groups of images with nearly the same hash, by index, in order. Images of a group are
    connected by pairs that differ in at most `MOST_DIFFERENT` bits."""
    known = [i for i, value in enumerate(hashes) if value]
    if len(known) < 2:
        return []
    packed = np.frombuffer(b"".join(hashes[i] for i in known), dtype=np.uint8)
    bits_NK = np.unpackbits(packed.reshape(len(known), -1), axis=1)
    parent = list(range(len(known)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    # Of MOST_DIFFERENT + 1 bands of bits, near duplicates share at least one.
    for band_NB in np.array_split(bits_NK, MOST_DIFFERENT + 1, axis=1):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        for i, key in enumerate(np.packbits(band_NB, axis=1)):
            buckets[key.tobytes()].append(i)
        for members in buckets.values():
            if 1 < len(members) <= CROWDED:
                for i, j in combinations(members, 2):
                    if root(i) == root(j):
                        continue
                    if np.count_nonzero(bits_NK[i] != bits_NK[j]) <= MOST_DIFFERENT:
                        parent[root(j)] = root(i)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, image in enumerate(known):
        groups[root(i)].append(image)
    return sorted(group for group in groups.values() if len(group) > 1)
