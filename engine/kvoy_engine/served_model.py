"""What the server side knows of the model that its core runs: names, text, limits, identity."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.blocks import BlockHash, seed_hash
from kvoy_contract.errors import ModelNotFound
from kvoy_contract.openai_responses import ModelCard
from kvoy_contract.prompt import PromptEncoder, TokenizerFiles
from kvoy_engine.sampling_params import ModelLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    """In requests; the first one is in answers, the others are its aliases."""
    encoder: PromptEncoder
    model_identity: str
    limits: ModelLimits
    created: int
    """Seconds since 1970, for the list of models."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self.encoder.files

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name not in self.names:
            raise ModelNotFound(name)

    def cards(self) -> list[ModelCard]:
        first = self.names[0]
        return [
            ModelCard(
                id=name,
                created=self.created,
                root=first,
                max_model_len=self.limits.max_model_len,
            )
            for name in self.names
        ]

    def seed_hash(self, cache_salt: str | None) -> BlockHash:
        return seed_hash(self.model_identity, "", cache_salt or "")
