"""The text of one choice: token ids in, pieces out, with stop strings, echo and logprobs applied.

A piece's logprobs cover the tokens whose text it, or an earlier piece, has shown: text that is held
back because it may become a stop string keeps its tokens' logprobs with it, and text that a stop
string cuts off takes them along. With logprobs, text is shown by whole tokens, so that the tokens
that were told of say what the client has: another engine goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvoy_contract.prompt import PromptEncoder
from kvoy_engine.detokenizer import Detokenizer, TokenText
from kvoy_engine.messages import FinishReason, TokenLogprob, TokensOut
from kvoy_engine.pieces import Piece, ScoredToken
from kvoy_engine.request_reader import PreparedRequest, PromptJob

_FINISH: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Echo:
    """What a choice repeats of its prompt before its own text."""

    text: str = ""
    scored: tuple[ScoredToken, ...] = ()


def plain_echo(prepared: PreparedRequest, job: PromptJob, encoder: PromptEncoder) -> Echo | None:
    """The echo that needs no logprobs; None where they have to be waited for."""
    if not prepared.echoes:
        return Echo()
    if prepared.request.num_logprobs is not None:
        if not prepared.has_begun(job.first_index):
            return None
        # Told by another engine; offsets go on behind it.
        return scored_echo(prepared, job, encoder, [None] * len(job.token_ids))
    if job.text is not None:
        return Echo(job.text)
    return Echo(encoder.decode(job.token_ids, prepared.request.skip_special_tokens))


def scored_echo(
    prepared: PreparedRequest,
    job: PromptJob,
    encoder: PromptEncoder,
    logprobs: Sequence[TokenLogprob | None],
) -> Echo:
    """The echo token by token; `logprobs` has one entry per prompt token."""
    detokenizer = Detokenizer(encoder, (), skip_special_tokens=prepared.request.skip_special_tokens)
    delta = detokenizer.push(job.token_ids)
    scored = tuple(
        ScoredToken(token, token.offset, logprob)
        for token, logprob in zip(delta.tokens, logprobs, strict=True)
    )
    return Echo(delta.text + detokenizer.finish().text, scored)


class ChoiceText:
    """Entity of one choice; `push` is called with its outputs in order."""

    def __init__(
        self, prepared: PreparedRequest, job: PromptJob, choice: int, encoder: PromptEncoder
    ) -> None:
        request = prepared.request
        self.index = job.first_index + choice
        self.finish_reason: str | None = None
        self.num_tokens = 0
        """Completion tokens, those of another engine included."""
        self.num_resumed = 0
        self._shows_stop_token = request.include_stop_str_in_output
        self._is_scored = request.num_logprobs is not None
        self._detokenizer = Detokenizer(
            encoder,
            job.token_ids,
            request.stop_strings,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.min_tokens,
        )
        self._echo: Echo | None = None
        self._num_chars = 0
        """Of the choice's own text that has been shown."""
        self._unshown_text = ""
        """What may be shown once its last token may be, as a whole."""
        self._unshown: deque[ScoredToken] = deque()
        self._untold_ids: list[int] = []
        self.is_resumed = prepared.has_begun(self.index)
        """Whether another engine has said something of it."""
        self.has_told_end = prepared.has_ended(self.index)
        """Whether another engine has told its finish reason."""
        if resumed := prepared.resumed_ids(self.index):
            self._replay(resumed, job)
        if self.has_told_end and self.finish_reason is None:
            self.finish_reason = "stop"  # told already, whatever it was: it is not said again

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_new_tokens(self) -> int:
        return self.num_tokens - self.num_resumed

    def end_piece(self) -> Piece:
        """The end of a choice whose replayed tokens had finished it."""
        return Piece(self.index, finish_reason=self.finish_reason)

    def push(self, out: TokensOut, echo: Echo) -> Piece:
        """The next piece; the first one begins with the echo. Not to be called once finished."""
        assert self.finish_reason is None
        piece = self._begin(echo)
        stops = out.finish_reason is FinishReason.STOP and bool(out.token_ids)
        shown_ids = out.token_ids
        if stops and not self._shows_stop_token:
            shown_ids = out.token_ids[:-1]
        delta = self._detokenizer.push(shown_ids)
        self._unshown_text += delta.text
        self._score(delta.tokens, out.logprobs)
        piece.token_ids = out.token_ids
        if delta.stopped:
            # Tokens of the same step behind the stop string were never said.
            piece.token_ids = out.token_ids[: len(delta.tokens)]
            self.finish_reason = "stop"
        elif out.finish_reason is not None:
            self._unshown_text += self._detokenizer.finish().text
            self.finish_reason = _FINISH[out.finish_reason]
        piece.text += self._show()
        self.num_tokens += len(piece.token_ids)
        taken = self._take_scored(is_whole=self.is_finished and not delta.stopped)
        piece.scored += taken
        piece.finish_reason = self.finish_reason
        piece.told_ids = self._told_ids(piece, None if out.logprobs is None else len(taken))
        return piece

    def _told_ids(self, piece: Piece, num_scored: int | None) -> list[int]:
        """All new ids; where logprobs are told, those whose logprobs have been."""
        if num_scored is None and not self._untold_ids:
            return piece.token_ids
        ids = self._untold_ids + piece.token_ids
        num_told = len(ids) if piece.finish_reason is not None else num_scored or 0
        self._untold_ids = ids[num_told:]
        return ids[:num_told]

    def _begin(self, echo: Echo) -> Piece:
        if self._echo is not None:
            return Piece(self.index)
        self._echo = echo
        if self.is_resumed:
            return Piece(self.index)  # the other engine has echoed it
        return Piece(self.index, echo.text, scored=list(echo.scored))

    def _replay(self, token_ids: list[int], job: PromptJob) -> None:
        """Bring the detokeniser to where another engine was; the client has that text."""
        self.num_resumed = self.num_tokens = len(token_ids)
        if token_ids[-1] in job.params.stop_token_ids and not self._shows_stop_token:
            token_ids = token_ids[:-1]
        delta = self._detokenizer.replay(token_ids, is_all_shown=self._is_scored)
        self._num_chars = len(delta.text)
        if delta.stopped:
            self.finish_reason = "stop"

    def _show(self) -> str:
        """The text that can be shown now."""
        end = self._num_chars + len(self._unshown_text)
        if not self.is_finished:
            end = self._end_of_whole_tokens(end)
        num_chars = end - self._num_chars
        text, self._unshown_text = self._unshown_text[:num_chars], self._unshown_text[num_chars:]
        self._num_chars = end
        return text

    def _end_of_whole_tokens(self, end: int) -> int:
        """The beginning of the first scored token that reaches beyond `end`, or `end`."""
        if not self._unshown:
            return end
        assert self._echo is not None
        starts = [token.offset - len(self._echo.text) for token in self._unshown]
        ends = [*starts[1:], self._detokenizer.num_chars]
        return next((at for at, to in zip(starts, ends, strict=True) if to > end), end)

    def _score(self, tokens: Sequence[TokenText], logprobs: Sequence[TokenLogprob] | None) -> None:
        if logprobs is None:
            return
        assert self._echo is not None
        base = len(self._echo.text)
        for token, logprob in zip(tokens, logprobs, strict=False):
            self._unshown.append(ScoredToken(token, base + token.offset, logprob))

    def _take_scored(self, *, is_whole: bool) -> list[ScoredToken]:
        """Tokens whose text is shown; all that are left when the text is whole."""
        assert self._echo is not None
        end = len(self._echo.text) + self._num_chars
        taken = []
        while self._unshown:
            first = self._unshown[0]
            is_shown = first.offset < end or (not first.token.data and first.offset == end)
            if not is_shown and not is_whole:
                break
            taken.append(self._unshown.popleft())
        return taken
