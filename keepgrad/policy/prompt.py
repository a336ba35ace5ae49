"""From a code prefix to prompt ids and from completion ids to text; needs `tokenizers` only, so the gateway stays free of torch."""

from pathlib import Path

from tokenizers import Tokenizer

from keepgrad.errors import ModelError

MOST_CHARS = 6
"""Characters of a prompt that are read for each of its tokens, at most."""
_STARTS = ("<|endoftext|>", "<s>", "<|begin_of_text|>")


class Prompter:
    """Renders prompts for one model folder; stateless after construction and safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ModelError(
                f"the model folder {folder} has no tokenizer.json: point [model] path at a folder that holds model and tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{file} is not a tokenizer that can be read ({error}): fetch the model again") from error
        known = [self._tokenizer.token_to_id(name) for name in _STARTS]
        self._start = [token for token in known if token is not None][:1]

    def encode(self, prefix: str, context_tokens: int) -> tuple[list[int], bool]:
        """Prompt ids for the code before the cursor, at most `context_tokens` of them, and whether the prompt is healed.

        One trailing space is left out ("healed"): the vocabularies in use write a word with its leading space as one token, so a prompt
        that ends in a space asks for a token the model has hardly seen. `clean` then drops the space the model writes itself.
        The first id is the document start, which also serves as attention sink when the prefix is cut.
        """
        healed = prefix.endswith(" ")
        text = prefix[:-1] if healed else prefix
        tail = text[-context_tokens * MOST_CHARS :]
        if len(tail) < len(text):
            tail = tail[tail.find("\n") + 1 :]
        ids = self.encode_text(tail)
        room = context_tokens - len(self._start)
        ids = self._start + ids[-room:]
        return (ids if len(ids) > 1 else self._start + self.encode_text("\n")), healed

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def clean(self, completion_ids: list[int], healed: bool) -> str:
        """The suggestion a developer sees: the first line of the completion, without the space that a healed prompt left to the model."""
        text = self.decode(completion_ids).split("\n", 1)[0].rstrip()
        return text[1:] if healed and text.startswith(" ") else text

    def stops(self) -> tuple[list[int], int]:
        """Ids that end a single-line suggestion (every token that contains a newline, every special token) and the vocabulary's size."""
        size = self._tokenizer.get_vocab_size()
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        newline = {token for token in range(size) if "\n" in self._tokenizer.decode([token])}
        return sorted(special | newline), size
