"""From a model reference to a `LoadedEngine`: fetch, read the tokenizer, start the core."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvoy_contract.prompt import PromptEncoder, TokenizerFiles, byte_tokenizer_files
from kvoy_contract.tokenizer_files import GENERATION_CONFIG
from kvoy_engine.build import CoreInfo, ModelLoadFailed, Progress, build_core
from kvoy_engine.config import EngineConfig
from kvoy_engine.group_leader import GroupCore, GroupLeader
from kvoy_engine.loop import CoreClient, ThreadCore
from kvoy_engine.sampling_params import ModelLimits, SamplingDefaults
from kvoy_engine.served_model import ServedModel
from kvoy_engine.server import LoadedEngine

T = TypeVar("T")


async def load_engine(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Everything that takes long before an engine can serve. Raises ModelLoadFailed."""
    names = config.served_model_name or (default_name(config),)
    folder = await _in_thread(lambda: _resolve(config, progress))
    if folder is not None:
        config = dataclasses.replace(config, model=str(folder))
    files = await _in_thread(lambda: _tokenizer_files(config, folder))
    client, info = await _start_core(config, progress)
    return LoadedEngine(client, info, served_model(names, files, info))


async def load_in_group(
    config: EngineConfig, progress: Progress, on_leaving: Callable[[], None]
) -> LoadedEngine:
    """As rank 0: loaded once every other rank has joined. Raises also GroupIncomplete.

    `on_leaving` is called when another rank was told to end.
    """
    leader = GroupLeader(config, on_leaving)
    await leader.start()
    try:
        loaded = await load_engine(config, progress)
        try:
            progress("the group")
            await leader.wait_until_complete()
        except BaseException:
            await loaded.client.close()
            raise
    except BaseException as error:
        await leader.close(is_orderly=isinstance(error, asyncio.CancelledError))
        raise
    return dataclasses.replace(loaded, client=GroupCore(loaded.client, leader))


def served_model(names: tuple[str, ...], files: TokenizerFiles, info: CoreInfo) -> ServedModel:
    """Raises ModelLoadFailed when the files make no tokenizer or defaults for this model."""
    try:
        encoder = PromptEncoder(files, vocab_size=info.runner.vocab_size)
        defaults = SamplingDefaults.from_generation_config(files.read_json(GENERATION_CONFIG))
    except ValueError as error:
        raise ModelLoadFailed(str(error)) from error
    limits = ModelLimits(
        max_model_len=info.token_limit,
        vocab_size=info.runner.vocab_size,
        eos_token_ids=encoder.eos_token_ids,
        defaults=defaults,
    )
    return ServedModel(names, encoder, info.model_identity, limits, int(time.time()))


def default_name(config: EngineConfig) -> str:
    """The name under which the model is served unless told otherwise."""
    if config.is_sim:
        return config.model_ref
    from kvoy_engine import model_store

    return model_store.default_name(config.model_ref)


def _resolve(config: EngineConfig, progress: Progress) -> Path | None:
    """The model's folder, fetched or converted where it has to be; None for a simulated one."""
    if config.is_sim:
        return None
    from kvoy_engine import model_store
    from kvoy_engine.model_errors import ModelSourceError

    try:
        folder = None if config.download_dir is None else Path(config.download_dir).expanduser()
        return model_store.resolve(config.model_ref, progress, download_dir=folder)
    except ModelSourceError as error:
        raise ModelLoadFailed(str(error)) from error


def _tokenizer_files(config: EngineConfig, folder: Path | None) -> TokenizerFiles:
    source = Path(config.tokenizer) if config.tokenizer is not None else folder
    if source is None:
        return byte_tokenizer_files()
    try:
        return TokenizerFiles.from_folder(source)
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"cannot read the tokenizer: {error}") from error


async def _start_core(config: EngineConfig, progress: Progress) -> tuple[CoreClient, CoreInfo]:
    if config.core == "process":
        from kvoy_engine.core_process import ProcessCore

        return await ProcessCore.launch(config, progress)
    built = await _in_thread(lambda: build_core(config, progress))
    return ThreadCore(built.core, built.close), built.info


async def _in_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, in a daemon thread: an abandoned load does not hold the exit."""
    event_loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = event_loop.create_future()

    def settle(action: Callable[[], None]) -> None:
        if not result.done():
            action()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            failure = error
            event_loop.call_soon_threadsafe(settle, lambda: result.set_exception(failure))
        else:
            event_loop.call_soon_threadsafe(settle, lambda: result.set_result(value))

    threading.Thread(target=run, name="kvoy-load", daemon=True).start()
    return await result
