"""Every layout puts image features at their tokens, and stores an image once however many texts contain it."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.data.batch import Context, Example
from trl_jax.data.images import (
    ImagePatches,
    feature_index,
    grid_positions,
    images_from_arrays,
    images_to_arrays,
    rounded_up,
    spans_of,
    text_images,
)
from trl_jax.data.loader import IndexedExample, StepLayout

IMAGE = 5


def image(number, rows=2, columns=3):
    """An image of `rows` x `columns` patches with one feature each; all pixels are about `number`."""
    count = rows * columns
    places = np.stack(np.unravel_index(np.arange(count), (rows, columns)), axis=1).astype(np.int32)
    return ImagePatches(
        np.full((count, 4), number, np.float32) + np.arange(count, dtype=np.float32)[:, None] / 100, places,
        spans_of([count]), np.arange(count, dtype=np.int32)[:, None], np.arange(count, dtype=np.int32),
        grid=(1, rows, columns),
    )  # fmt: skip


def example(images, *answers, context=None, positions=True):
    """A prompt with these images, and texts that each consist of the whole prompt and an answer."""
    prompt = [7]
    for one in images:
        prompt += [IMAGE] * len(one.tokens) + [8, 9]
    texts = tuple(np.array(prompt + list(answer)) for answer in answers)
    labels = tuple(np.where(np.arange(len(ids)) < len(prompt), -100, ids) for ids in texts)
    features = tuple(feature_index(ids, IMAGE, images) for ids in texts)
    places = tuple(grid_positions(ids, IMAGE, images) for ids in texts) if positions else ()
    context = None if context is None else Context(context, len(prompt))
    return Example(texts, labels=labels, images=tuple(images), features=features, positions=places, context=context)


def step(layout, examples, **options):
    batches = [[IndexedExample(one, number) for number, one in enumerate(examples)]]
    return StepLayout(len(examples), 0, None, layout, **options).step(batches, 0).arrays


def tokens_with_pixels(arrays):
    """(pass, value of the patch that each image token sees, rounded down), in the order of the pass's tokens."""
    images, found = arrays.images, []
    for number in range(len(arrays.tokens)):
        at, patches = images.at[number].reshape(-1), images.patches[number, 0]
        seen = patches[images.groups[number, 0, at[at >= 0], 0], 0]
        assert np.array_equal(arrays.tokens[number].reshape(-1)[at >= 0], np.full(len(seen), IMAGE))
        assert np.array_equal(at >= 0, arrays.tokens[number].reshape(-1) == IMAGE)
        found.append(seen)
    return found


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("positions", [True, False])
def test_image_tokens_see_their_patches_and_have_their_positions(layout, positions):
    first, second = image(1), image(2, 3, 2)
    pairs = [
        example([first, second], [10, 11], [12], positions=positions),
        example([], [13, 14], [15, 16, 17], positions=positions),
        example([second], [18], [19, 20], positions=positions),
    ]
    arrays = step(layout, pairs)
    [seen] = tokens_with_pixels(arrays)
    stored = np.unique(arrays.images.patches[0, 0, :, 0][arrays.images.first[0, 0] < 64])
    assert len(stored) == 12  # of two images, one of which occurs in two examples
    whole = [1 + n / 100 for n in range(6)] + [2 + n / 100 for n in range(6)]
    copies = 1 if layout == "shared" else 2
    assert sorted(np.round(seen, 2)) == sorted((whole + whole[6:]) * copies)
    assert arrays.images.patches.shape[-2] == 64 and arrays.images.groups.shape[2] == 32
    for text in (0, 2):  # the spans of patches cover their own image
        begin, end = arrays.images.first[0, 0, text * 6], arrays.images.end[0, 0, text * 6]
        assert end - begin == 6
    if not positions:
        assert arrays.positions.shape == arrays.tokens.shape
        return
    assert arrays.positions.shape == (*arrays.tokens.shape, 3)
    if layout == "padded":  # rows of texts: first the first answers of all examples, then the second ones
        assert np.array_equal(arrays.positions[0, 0, :19], pairs[0].positions[0])
        assert np.array_equal(arrays.positions[0, 5, :11], pairs[2].positions[1])
        assert np.array_equal(arrays.positions[0, 1, :3], np.repeat(np.arange(3)[:, None], 3, axis=1))


def test_completions_of_a_prompt_share_its_image():
    one = image(1)
    group = [example([one], [10 + number], context="prompt") for number in range(4)]
    arrays = step("shared", group)
    assert (arrays.images.first[0, 0] < 64).sum() == 6 and (arrays.tokens == IMAGE).sum() == 6


def test_shards_have_images_of_their_own():
    rows = [example([image(number)], [10]) for number in range(4)]
    batches = [[IndexedExample(one, number) for number, one in enumerate(rows)]]
    arrays = StepLayout(4, 0, None, "packed", shards=2).step(batches, 0).arrays
    assert arrays.tokens.shape[:2] == (1, 2) and arrays.images.patches.shape[:3] == (1, 2, 1)
    assert all(len(np.unique(arrays.images.patches[0, shard, 0, :12, 0].round())) == 2 for shard in range(2))


def test_steps_without_images_have_none():
    assert step("packed", [example([], [10], [11])]).images is None


def test_positions_go_on_after_the_longest_side_of_an_image():
    ids = np.array([7, *[IMAGE] * 6, 8, *[IMAGE] * 6])
    positions = grid_positions(ids, IMAGE, [image(0), image(0, 3, 2)])
    assert positions[:8].tolist() == [
        [0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4, 4, 4],
    ]  # fmt: skip
    assert positions[8:].tolist() == [[5, 5, 5], [5, 5, 6], [5, 6, 5], [5, 6, 6], [5, 7, 5], [5, 7, 6]]


def test_a_text_with_another_number_of_image_tokens_is_refused():
    with pytest.raises(ValueError, match="the text has 5 image tokens, but its 1 images have 6 features"):
        feature_index(np.full(5, IMAGE), IMAGE, [image(0)])


def test_few_sizes():
    sizes = {rounded_up(count, 64) for count in range(1, 5000)}
    assert sizes == {64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144}


def test_pictures_that_differ_in_their_features_alone_have_keys_of_their_own():
    """For example two black images that are padded to one size, where padding yields no features."""
    whole = ImagePatches(
        np.zeros((4, 3), np.float32), np.zeros((4, 2), np.int32), spans_of([4]), np.arange(4, dtype=np.int32)[:, None],
        np.arange(4, dtype=np.int32),
    )  # fmt: skip
    part = whole._replace(groups=whole.groups[:2], tokens=whole.tokens[:2])
    texts = [text_images(np.full(len(image.tokens), 7), 7, [image]) for image in (whole, part, whole)]
    assert texts[0].key == texts[2].key != texts[1].key
    again = images_from_arrays(images_to_arrays([*texts, None]))
    assert again[3] is None and [len(text.features) for text in again[:3]] == [4, 2, 4]
    assert [len(text.images[0].groups) for text in again[:3]] == [4, 2, 4]
