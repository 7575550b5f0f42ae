"""How the states of a store are stored: as its settings say, as they are already, or as planned for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import contains
from pathlib import Path

from ragcache.model.language_model import LanguageModel
from ragcache.restore.formats import candidates, every_form, state_format
from ragcache.restore.measure import RememberedProfile, machine_profile
from ragcache.settings import CodecName, Settings, StatesName
from ragcache.states.form import StateFormat
from ragcache.states.inventory import Inventory
from ragcache.states.store import StateStore

MEASURING = "measuring disk and processor (once)"


def choose_format(
    model: LanguageModel,
    settings: Settings,
    path: Path,
    store: StateStore | None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> StateFormat:
    """How a model's states are stored in a store.

    With `auto`, what was chosen once stays, for rates vary from one measurement to the next and another format means
    encoding all documents again: states that the store has in the codec of the settings decide, if planning could have
    chosen their forms on this machine or another. Else the forms are planned, and the machine is measured if more than
    one form can be the best.

    Args:
        model: the model.
        settings: of the store.
        path: of the store, which need not be there yet.
        store: the store, if there is one.
        on_stage: told before the machine is measured.

    Raises:
        ProfileError: the machine cannot be measured.
        StoreError: the store's catalog cannot be read.
    """
    in_context = "context" in settings.encodings
    choices = candidates(model, settings.states, settings.codec, model.device.type, in_context=in_context)
    if store is not None:
        present = present_format(model, settings.states, settings.codec, store, in_context=in_context)
        if present is not None:
            return present
    profile = None
    if any(len(layer) > 1 for layer in choices):
        profile = settings_profile(model, settings, path, on_stage=on_stage).profile
    return state_format(model, settings.states, settings.codec, profile, in_context=in_context)


def present_format(
    model: LanguageModel, states: StatesName, codec: CodecName, store: StateStore, *, in_context: bool = False
) -> StateFormat | None:
    """The latest of a store's formats that would be chosen for these settings, on a CPU or on a GPU."""
    # The candidates on a CPU are among those on a GPU. What is stored of the first layer depends on more than settings.
    _, *choices = candidates(model, states, codec, "cuda", in_context=in_context)
    first = every_form(model, codec)[0].values()
    for format in _formats(model, store):
        if len(format.layers) == 1 + len(choices) and all(map(contains, [first, *choices], format.layers)):
            return format
    return None


def latest_format(model: LanguageModel, store: StateStore) -> StateFormat | None:
    """The format of the states that a model has put into a store last."""
    return next(_formats(model, store), None)


def _formats(model: LanguageModel, store: StateStore) -> Iterator[StateFormat]:
    """The formats of a model's states in a store, the latest first; those of newer versions are passed over."""
    for text in Inventory(store.catalog).formats(model.fingerprint.digest):
        with suppress(ValueError):
            yield StateFormat.from_json(text)


def settings_profile(
    model: LanguageModel,
    settings: Settings,
    path: Path,
    *,
    measure: bool = False,
    on_stage: Callable[[str], None] = lambda _: None,
) -> RememberedProfile:
    """The rates of this machine for a store's settings; see `machine_profile`."""
    return machine_profile(
        model,
        settings.state_folders or (path,),
        settings.codec,
        settings.reader_threads,
        settings.cache_folder,
        measure=measure,
        on_measure=lambda: on_stage(MEASURING),
    )
