"""SQL of one expression over columns, checked node by node.

Polars reads the files of a subquery (`reward IN (SELECT x FROM read_csv('...'))`) while it parses
SQL, so it never sees a user's text. The text is parsed here, every node of the tree must be of an
allowed kind, and Polars gets the SQL that is generated from the tree. A text that the two parsers
would read differently can therefore hide nothing.
"""

from __future__ import annotations

import re
from typing import ClassVar

from sqlglot import Dialect, ParseError, TokenType, exp, generator, parser
from sqlglot import Tokenizer as BaseTokenizer
from sqlglot.errors import SqlglotError

MOST_OPERATORS = 500
"""Limit on names and operators per expression; thousands overflow the stack of Polars' parser."""

_VALUES = {TokenType.STRING, TokenType.NUMBER, TokenType.COMMA}
_WORD, _NUMBER = re.compile(r"[^\W\d]\w*"), re.compile(r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+")
_QUERY_WORDS = frozenset({"select", "from", "with", "table", "values", "where", "group", "order"})
_NAMED = {
    "tool_calls": "a tool's name",
    "tool_errors": "a tool's name",
    "findings": "the name of findings",
}
_FOLDS = frozenset({"all", "last", *_NAMED})
_ESCAPED_QUOTE = re.compile(r"""\\(['"]|$)""")
_COMPARED = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
_ALLOWED = frozenset(
    {
        *(exp.Column, exp.Identifier, exp.Dot, exp.Literal, exp.Boolean, exp.Null, exp.Array),
        *(exp.And, exp.Or, exp.Not, exp.Paren, exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div),
        *(exp.IntDiv, exp.Mod, exp.DPipe, exp.BitwiseAnd, exp.BitwiseOr, exp.BitwiseXor),
        *(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ),
        *(exp.Is, exp.Between, exp.In, exp.Like, exp.ILike, exp.Escape, exp.RegexpLike),
        *(exp.RegexpILike, exp.Any, exp.Case, exp.If, exp.Cast, exp.TryCast, exp.DataType),
        *(exp.DataTypeParam, exp.Anonymous, exp.Bracket, exp.Slice, exp.Tuple, exp.Distinct),
        *(exp.Window, exp.WindowSpec, exp.Order, exp.Ordered, exp.Star),
    }
)


class TooLongError(Exception):
    """The expression has too many names and operators, or is nested too deeply."""


class NotAnExpressionError(Exception):
    """The text is not SQL, or is more than an expression over columns; the message says what."""


class _Dialect(Dialect):
    """SQL whose functions keep their names, because Polars decides what they mean."""

    class Tokenizer(BaseTokenizer):
        KEYWORDS: ClassVar = {
            **BaseTokenizer.KEYWORDS,
            "~": TokenType.RLIKE,
            "~*": TokenType.IRLIKE,
            "//": TokenType.DIV,
            "INT8": TokenType.BIGINT,  # bytes, as for Polars
        }

    class Parser(parser.Parser):
        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: parser.Parser.FUNCTION_PARSERS[name] for name in ("CAST", "TRY_CAST")
        }
        NO_PAREN_FUNCTIONS: ClassVar = {}

    class Generator(generator.Generator):
        TRANSFORMS: ClassVar = {
            **generator.Generator.TRANSFORMS,
            exp.RegexpILike: lambda self, node: self.binary(node, "~*"),
            exp.IntDiv: lambda self, node: self.binary(node, "//"),
        }


def split_sql(text: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Replace calls of `any`, `all`, `last` and `_NAMED` by names of columns.

    `x = any(list)` and `last(x) OVER (...)` are left as they are: they belong to a row.

    Returns:
        The SQL; and each name with its function and the SQL of its argument.

    Raises:
        NotAnExpressionError: The text is not one expression over columns, or a call has no
            argument, several, or another such call inside, or no name in quotes.
        TooLongError: The expression is too long.

    Example:
        >>> split_sql("num_turns = 1 and any(reward > 0)")
        ('"num_turns" = 1 AND "__part_0__"', {'__part_0__': ('any', '"reward" > 0')})
    """
    tree, parts = _checked(text), dict[str, tuple[str, str]]()
    for node in list(tree.walk()):
        function = _fold_of(node)
        if function is None:
            continue
        inner = [node.this.unnest()] if isinstance(node, exp.Any) else node.expressions
        if len(inner) != 1 or isinstance(inner[0], exp.Tuple):
            raise NotAnExpressionError(f"{function} takes one condition in brackets")
        if any(_fold_of(one) for one in inner[0].walk()):
            raise NotAnExpressionError(f"{function} contains another such function")
        if function in _NAMED and not inner[0].is_string:
            raise NotAnExpressionError(f"{function} takes {_NAMED[function]} in quotes")
        name = f"__part_{len(parts)}__"
        parts[name] = function, _generated(inner[0])
        column = exp.column(name)
        tree = column if node is tree else tree
        node.replace(column)
    return _generated(tree), parts


def _fold_of(node: exp.Expr) -> str | None:
    """Return the name of the function if a node folds the rows of a trajectory; else None."""
    if isinstance(node, exp.Any):
        is_list = isinstance(node.parent, _COMPARED) and node.arg_key == "expression"
        return None if is_list else "any"
    if isinstance(node, exp.Anonymous) and not isinstance(node.parent, exp.Window):
        return node.this.lower() if node.this.lower() in _FOLDS else None
    return None


def checked_sql(text: str) -> str:
    """Parse SQL, and generate it again from its tree.

    Raises:
        NotAnExpressionError: The text is not one expression over columns.
        TooLongError: The expression is too long.

    Example:
        >>> print(checked_sql("reward>0 and agent='main'"))
        "reward" > 0 AND "agent" = 'main'
    """
    return _generated(_checked(text))


def _generated(tree: exp.Expr) -> str:
    try:
        return tree.sql(_Dialect(), comments=False, identify=True, normalize_functions=False)
    except RecursionError:
        raise TooLongError from None


def _checked(text: str) -> exp.Expr:
    dialect = _Dialect()
    try:
        tokens = dialect.tokenize(text)
        for token in tokens:
            if token.token_type is TokenType.SEMICOLON:
                raise _unexpected(text, token.start)
            if token.comments:
                raise NotAnExpressionError("a condition cannot contain a comment")
        if sum(token.token_type not in _VALUES for token in tokens) > MOST_OPERATORS:
            raise TooLongError
        (tree,) = dialect.parser().parse_into(exp.Condition, tokens, text) or [None]
        if tree is None:
            raise NotAnExpressionError("an empty condition")
        for node in tree.walk():
            if type(node) not in _ALLOWED or not _is_plain(node):
                raise NotAnExpressionError(_refused(node))
    except RecursionError:
        raise TooLongError from None
    except ParseError as error:
        first = error.errors[0] if error.errors else {}
        near = first.get("highlight") or ""
        column = first.get("col") or len(text)
        raise _unexpected(text, column - len(near)) from None
    except SqlglotError as error:
        finding = str(error.__cause__ or error).split("\n")[0]
        raise NotAnExpressionError(f"the SQL cannot be read: {finding}") from None
    return tree


def _unexpected(text: str, start: int) -> NotAnExpressionError:
    word = _WORD.match(text, start)
    if word and word[0].lower() in _QUERY_WORDS:
        finding = f"a condition cannot contain {word[0]}, which is a keyword of SQL queries"
        return NotAnExpressionError(finding)
    near = f"unexpected {text[start : start + 12]!r}" if text[start:] else "it is cut off"
    return NotAnExpressionError(f"{near} at character {start + 1}")


def _is_plain(node: exp.Expr) -> bool:
    """True if all parsers read the node's text in the same way once it is generated again.

    Names are generated in quotes. A backslash before a quote ends a text for some parsers, and `$$`
    begins one.
    """
    if isinstance(node, exp.Literal) and not node.is_string:
        return _NUMBER.fullmatch(node.this) is not None
    if isinstance(node, exp.Identifier) and not node.args.get("quoted"):
        return _WORD.fullmatch(node.this) is not None
    if isinstance(node, exp.Literal | exp.Identifier):
        return _ESCAPED_QUOTE.search(node.this) is None
    if isinstance(node, exp.Anonymous):
        return isinstance(node.this, str) and _WORD.fullmatch(node.this) is not None
    return not (isinstance(node, exp.DataType) and node.this == exp.DataType.Type.USERDEFINED)


def _refused(node: exp.Expr) -> str:
    text = node.sql(_Dialect, comments=False)
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    is_query = isinstance(node, exp.Query | exp.Table | exp.Exists | exp.Values)
    return f"a condition cannot contain {'a query' if is_query else 'this'}: {shown!r}"
