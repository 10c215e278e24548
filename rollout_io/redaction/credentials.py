"""Credentials, recognised by the shape that they have or by the place where they are.

Both are tables: for each kind, words of which a text must have one, and an expression whose group
`secret` (or else the match) is the value. Those of places match texts in lower case. Code and
manuals have the same places (`password = None`, `API_KEY=$KEY`, `token: string`), so what stands there
must look like a secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Place = tuple[str, int, int]
"""Kind, start and end."""

_PREFIXES = """
sk-ant- sk-proj- sk-svcacct- sk-admin- sk-or- sk-lf- sk-ws- sk- csk- gsk_ xai- pplx- r8_ hf_ api_org_
nvapi- llx- tvly- e2b_ ntn_ secret_ fc- bb_live_ ctx7sk- jina_ pa- pcsk_ fw_ lsv2_pt_ lsv2_sk_ BSA
ya29. GOCSPX- AIza AQ. ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glrt- glcbt- glptt-
glft- glsoat- glimt- glagent- xoxb- xoxp- xoxa- xoxr- xoxs- xoxe- xoxe. xoxc- xoxd- xapp- sk_live_
sk_test_ rk_live_ rk_test_ whsec_ SG. key- npm_ pypi- dckr_pat_ dckr_oat_ dop_v1_ doo_v1_ dor_v1_
shpat_ shpss_ shpca_ shppa_ lin_api_ lin_oauth_ figd_ glsa_ glc_ dapi dp.pt. dp.st. dt0c01. sq0atp-
sq0csp- EAA AGE-SECRET-KEY-1 hvs. hvb. hvr. ATATT3 ATCTT3 ATBB PMAK- rubygems_ sntrys_ sntryu_ NRAK-
phx_ sbp_ sb_secret_ nfp_ fm2_ apify_api_ CCIPAT_ ico- pul- tskey- oy2 AKCp FLWSECK- sgp_ ops_ A3-
xkeysib- xsmtpsib- mlsn. re_ vcp_ vck_ rnd_ LTAI CFPAT- EZAK
"""
_STARTS = "|".join(re.escape(name) for name in sorted(_PREFIXES.split(), reverse=True))
_MARGIN = r"(?>(?:[\s\d|>+.:,\"'-]|\\+[nrt]){1,24})"  # numbers, quotes and escaped ends of lines
SHAPES = {
    "prefixed-token": ("", rf"(?<![A-Za-z0-9_])(?:{_STARTS})(?P<tail>[\w.+=~-]{{15,}}[\w=])"),
    "session-token": (
        "IQoJb3JpZ2lu FwoGZXIvYXdz 1//0 Atz",
        r"(?<![A-Za-z0-9_])(?:IQoJb3JpZ2lu|FwoGZXIvYXdz|1//0|Atz[ar]\|)[\w/+=-]{30,}",
    ),
    "airtable-token": ("pat", r"\bpat[A-Za-z0-9]{14}\.[0-9a-f]{64}\b"),
    "refresh-token": ("rt_", r"(?<![A-Za-z0-9_])rt_[\w.-]{39,}\w"),
    "telegram-bot-token": (":AA", r"(?<!\d)\d{8,10}:AA[\w-]{32,35}"),
    "discord-bot-token": ("", r"\b[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40}"),
    "twilio-key": ("SK", r"\bSK[0-9a-f]{32}\b"),
    "json-web-token": ("eyJ", r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{16,}"),
    "aws-access-key-id": ("AKIA ASIA", r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
    "webhook": (
        "/services/ /webhooks/",
        r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/(?P<secret>[\w/-]{30,})",
    ),
    "password-hash": ("$", r"\$(?:apr1|2[aby]|5|6|y|argon2\w{1,2})\$[\w.$/=,+-]{16,}"),
    "private-key": (
        "-----BEGIN",
        rf"-----BEGIN [A-Z0-9 ]{{0,20}}PRIVATE KEY(?: BLOCK)?-----(?P<secret>(?:{_MARGIN}"
        rf"[A-Za-z0-9+/=]{{24,}}+)+(?:{_MARGIN}[A-Za-z0-9+/=]{{1,76}}+(?=\W{{0,16}}-----END))?)",
    ),
    "end-of-private-key": (
        "-----END",
        r"(?<![A-Za-z0-9+/])(?P<secret>(?:[A-Za-z0-9+/]{40,76}+"
        rf"{_MARGIN}){{1,80}}[A-Za-z0-9+/=]{{0,76}}\W{{0,16}})-----END [A-Z0-9 ]{{0,20}}PRIVATE KEY",
    ),
    "putty-key": (
        "Private-Lines",
        r"Private-Lines: \d+\s+(?P<secret>(?:[A-Za-z0-9+/=]{4,64}\s+)+)",
    ),
}

# A password may be short and chosen by a person; a token is long and random. The words with which a
# name ends are found first, and what is before them is checked later.
_PASSWORD = r"pass(?:words?|wd|phrase|code)?|pwd?|secrets?"
_TOKEN = r"tokens?|keys?|credentials?|authorization|auth|cookie|signature|sig|sid|jwt|pat|code"
_KEY = (
    rf"(?:(?P<password>{_PASSWORD})|(?P<token>{_TOKEN}))"
    r"(?:[_-]?(?:\d{1,2}|base|value|prod|production|dev|staging|test|live|old|new|plain|b64|base64))?"
)
_BEFORE = {
    b"keys": rb"(?!)",
    b"key": rb"""(?:secret|private|signing|encryption|master|account|access|auth|api|app|client|deploy|
shared|service|license|subscription|consumer|jwt|hmac|webhook|project|admin)[_.\s-]?\Z|[?&]\Z""",
    b"token": rb"(?<!next)(?<!next[_-])(?<!page)(?<!page[_-])(?<!sync)(?<!sync[_-])(?<!ation[_-])\Z",
    **dict.fromkeys(
        (b"pass", b"pw", b"auth", b"sig", b"signature", b"sid", b"jwt", b"pat"), rb"(?:^|[^a-z])\Z"
    ),
    b"code": rb"[?&]\Z",
    b"tokens": rb"(?!)",
}
_BETWEEN = r"""\\*["'`\])]{0,2}(?:[ \t]{0,4}(?:=>|:=|==?|:(?![:/]))\s{0,3}(?:[|>][-+]?\s{1,40})?|
:[ ]?(?:str|string|secretstr|optional\[str\]|str[ ]\|[ ]none)[ ]?=[ ]?|
(?P<second>[ \t]{0,3},\s{0,3}(?=\\*["']))|[\s,]{1,40}\\*["']?value\\*["']?[ ]{0,3}[:=][ ]{0,3}|>(?=[^<>\s]+</))"""
_SCHEME = r"(?:(?:basic|bearer|token|digest|apikey|key|negotiate|oauth|bot|geniekey)\s+)?"
_VALUE = rf"""(?:[bru]?\\*(?P<quote>["'`]){_SCHEME}(?P<quoted>(?:(?!\\*(?P=quote))[^\r\n]){{6,600}})
(?:\\*(?P=quote)|\Z)|{_SCHEME}(?P<bare>(?:[^\s"'`<>\\,;&]|\\(?![nrtu"'\\/])|
[,;&](?=\S)(?![ ]?[\w.-]+[ ]?[=:])){{4,600}}))"""
_NAMED = (_KEY + _BETWEEN + _VALUE).replace("\n", "")

_WORD = r"""["']?(?!-)(?P<secret>(?:[^\s"'<>|;&\\]|\\(?![nrtu"'\\/])){4,128})"""
_DATABASE, _CLIENT = (
    r"\b(?:mysql\w*|mariadb\w*)\b[^\n|;&]{0,200}?",
    r"\b(?:sshpass|docker login|podman login|az login|mongo\w*|sqlcmd|zip|7z|unzip|redis-cli|ldap\w+)\b"
    r"[^\n|;&]{0,200}?",
)
PLACES = {
    "named-secret": ("", _NAMED),
    "password-in-url": ("://", r"://[\w.%+-]{0,64}:(?P<secret>[^\s/:@'\"<>{}$*]{6,128})@"),
    "token-in-url": ("://", r"://(?P<random>[\w-]{20,128})@"),
    "bearer-token": ("bearer", r"\bbearer (?P<secret>[\w.~+/-]{19,}[\w=])"),
    "password-option": ("mysql mariadb", rf"{_DATABASE}\s-p{_WORD}"),
    "password-of-command": (
        "sshpass login mongo sqlcmd zip 7z redis-cli ldap",
        rf"{_CLIENT}\s-[paw]\s?{_WORD}",
    ),
    "user-option": (
        "curl wget http smbclient rpcclient",
        r"\b(?:curl|wget|http|smbclient|rpcclient)\b[^\n|;]{0,300}?\s(?:-u|-a|--user|"
        r"--proxy-user)[ =]?[\"']?[^\s\"':%]{1,64}[:%](?P<secret>[^\s\"'<>|;&]{4,128})",
    ),
    "secret-option": (
        "-",
        r"\s--?[\w-]{0,30}(?:password|passwd|passphrase|pass|token|secret|auth|"
        rf"(?:api|access|secret|auth|account)[-_]?key)[ =]{_WORD}",
    ),
    "argument-of-command": (
        "mc config htpasswd aws",
        r"\b(?:mc(?:li)? (?:alias set|config host add)(?:\s+(?!-)\S+){3}|htpasswd -\w*b\w*\s+\S+\s+\S+|"
        r"(?:aws configure set|(?:npm|pnpm|yarn|git|pip|poetry|composer|rclone) config)\b"
        rf"[^\n|;&]{{0,200}}?[ ./:_-](?:{_PASSWORD}|\w*token|(?:secret|access|api|auth|account)"
        rf"[_-](?:access[_-])?key)[\w.-]{{0,20}})[ \t]+{_WORD}",
    ),
    "token-argument": (
        "vault wandb snyk ngrok",
        r"\b(?:vault login|wandb login|snyk auth|ngrok (?:config add-)?authtoken)[ \t]+"
        r"(?:-[\w=-]+[ \t]+)*[\"']?(?P<random>[\w.-]{20,256})",
    ),
    "here-string": (
        "<<<",
        r"\b(?:login|auth|\w*passwd|secrets?|token|stdin)\b[^\n|;&<]{0,120}"
        rf"<<<[ \t]?{_WORD}",
    ),
    "literal-of-secret": ("--from-literal", rf"--from-literal[ =][\"']?[\w.-]+={_WORD}"),
    "password-argument": (
        "-pass",
        r"-pass(?:in|out)?\s+(?:pass:)?(?P<secret>[^\s\"'<>|;&]{4,128})",
    ),
    "piped-password": (
        "echo",
        r"\becho\s+(?:-n\s+)?[\"']?(?:\w+:)?(?P<secret>[^\s\"'|:]{4,128})[\"']?\s*\|\s*"
        r"(?:sudo -s|(?:sudo )?chpasswd|passwd|docker login|podman login|gh auth)",
    ),
    "netrc": ("login", rf"\blogin\s+\S+\s+password\s+{_WORD}"),
    "pgpass": (":", rf"(?<![^\s\"'])[\w.*-]+:(?:\d{{2,5}}|\*):[\w*-]+:[\w*-]+:{_WORD}"),
    "sql-password": (
        "'",
        r"\b(?:identified\s+(?:with\s+\w+\s+)?by|password)\s+'(?P<secret>[^'\n]{4,})'",
    ),
    "redis-password": (
        "requirepass masterauth auth",
        rf"^\s*(?:requirepass|masterauth|auth)\s+{_WORD}",
    ),
    "mnemonic": (
        "mnemonic phrase",
        r"(?:mnemonic|seed[ _-]?phrase|recovery[ _-]?phrase)\W{1,6}"
        r"(?P<phrase>(?:[a-z]{3,8} ){11,23}[a-z]{3,8})",
    ),
    "told-secret": (
        "is was to part",
        r"\b(?:password|passphrase|secret|token|api key|access key|credential)s?\b"
        r"[^\n\"'=:;.]{0,24}?(?:\bis\b|\bwas\b|\bto\b|\bpart\b)[ \t]*[\"'`]{0,2}"
        r"(?P<random>[^\s\"'`<>,;]{8,256})",
    ),
    "digest-response": ("response=", r"\bresponse=\\*\"(?P<secret>[0-9a-f]{32,64})\\*\""),
    "secure-string": ("securestring", rf"convertto-securestring\s+(?:-string\s+)?{_WORD}"),
    "shared-access": (
        "accountkey= sharedaccesskey=",
        r"\b(?:accountkey|sharedaccesskey)=(?P<secret>[\w+/=-]{16,})",
    ),
}
_COOKIES = ("cookie", r"cookie\\*[\"']?\s{0,2}[:=,]\s{0,2}\\*[\"']?(?P<pairs>[^\r\n\"'\\]{8,4096})")
_COOKIE = re.compile(
    rb"(?<![\w.-])(?!(?:expires|path|domain|max-age|samesite|version)=)[\w.-]+=([^;\s,]{8,})", re.I
)

# What code and manuals have in such places: words, and expressions.
_WORDS = re.compile(
    rb"""(?:my|your|the|an?|some|any|no|tests?|testing|fake|mock|dummy|sample|example|super|strong|new|old|
users?|username|name|db|database|root|admin|guest|api|app|access|auth|oauth|client|server|private|public|
session|refresh|bearer|basic|digest|tokens?|passwords?|passwd|pass|pwd|pw|secrets?|keys?|values?|string|str|
text|bytes|number|integer|int|boolean|bool|object|any|array|list|dict|file|path|hashed|hash|field|input|
label|prompt|form|type|id|required|optional|invalid|incorrect|wrong|missing|confirm|reset|forgot|changeme|
change|me|here|goes|default|none|null|nil|undefined|true|false|empty|unset|set|redacted|hidden|masked|foo|
bar|baz|abc|postgres|mysql|redis|secretstr|environ|env|header|cookie|valid|is|not|of|to|from|and|or|with|
for|in|on|must|be|should|enter|provided|needed|only|read|write|credentials?|authorization|provider|
manager|store|service|url|uri|json|web|code|letmein|qwerty|[-_.,!?:/\s]|\d{1,4}(?!\d))+""".replace(
        b"\n", b""
    ),
    re.I,
)
_EXPRESSION = re.compile(
    rb"""^\$[A-Za-z_{(]|\$\{|\{\{|%\(|^%\w+%$|^<.*>$|^\{.*\}$|^\[.*\]$|^\(.*\)$|\.\.\.|\xe2\x80\xa6|\*{3}|
x{4,}|^(.)\1+$|^[A-Za-z_][\w.]*[(\[]|^[A-Za-z_]+(?:\??\.[A-Za-z_]+)+$|
^(?:self|this|os|process|env|config|settings|args|req|request|ctx|secrets|vars?|local|module|data)\.|
^(?:~|\.{0,2})(?:/[\w.-]+){2,}/?$|^[A-Za-z]:\\|^\w+://|example|your[_-]|placeholder|change[_-]?me|
redacted|\s|\\u[0-9a-f]{4}|^[&*]\w+$|<[a-z][\w -]*>|^12345?6?7?8?9?0?$|deadbeef""".replace(
        b"\n", b""
    ),
    re.I,
)
_RUNS = re.compile(rb"[a-z]+|[A-Z]+|\d+|[^A-Za-z\d]+")
_HUMPS = re.compile(rb"[A-Z]?[a-z]+|[A-Z]+")
_ENCODED = re.compile(rb"(?<![\w+/])[\w+/-]{32,}={0,2}")
_LONG = re.compile(rb"[\w.+=~-]{18,}")
_PLAIN = re.compile(rb"[\t\r\n\x20-\x7e]+")
_CALL = re.compile(rb"[(\[]\\*[\"'][\w.-]{0,40}\Z")
_GROUPS = ("secret", "quoted", "bare", "random", "phrase")


class _Kind(NamedTuple):
    name: str
    needs: tuple[bytes, ...]
    expression: re.Pattern[bytes]

    def matches(self, content: bytes) -> Iterator[re.Match[bytes]]:
        """Yield the matches; a value may begin with the name of the next one."""
        at = 0 if not self.needs or any(word in content for word in self.needs) else len(content)
        while match := self.expression.search(content, at):
            yield match
            value = match.start(match.lastgroup or 0)
            at = value if value > match.start() else match.end()


def _kinds(table: Mapping[str, tuple[str, str]]) -> list[_Kind]:
    return [
        _Kind(name, tuple(needs.encode().split()), re.compile(pattern.encode(), re.M))
        for name, (needs, pattern) in table.items()
    ]


_SHAPES, _PLACES, (_HEADERS,) = _kinds(SHAPES), _kinds(PLACES), _kinds({"cookie": _COOKIES})
_PREFIXED = _SHAPES.pop(0)


def credentials(content: bytes) -> Iterator[Place]:
    r"""Yield the credentials of a text: their kind, start and end.

    Example:
        >>> list(credentials(b"DB_PASSWORD=tr0ub4dor\nTOKEN=$TOKEN"))
        [('named-secret', 12, 21)]
    """
    yield from _plain_credentials(content)
    for match in _ENCODED.finditer(content):
        plain = decoded(match[0])
        if plain and next(_plain_credentials(plain), None):
            yield "base64", *match.span()


def decoded(text: bytes) -> bytes:
    """Return the printable text that base64 encodes, or nothing."""
    plain = text.rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
    try:
        head = base64.b64decode(plain[:32])
        if _PLAIN.fullmatch(head):
            whole = base64.b64decode(plain + b"=" * (-len(plain) % 4))
            return whole if _PLAIN.fullmatch(whole) else b""
    except binascii.Error:
        pass
    return b""


def _plain_credentials(content: bytes) -> Iterator[Place]:
    for long in _LONG.finditer(content):
        for match in _PREFIXED.expression.finditer(content, *long.span()):
            if is_random(match["tail"]):
                yield _PREFIXED.name, *match.span()
    for shape in _SHAPES:
        for match in shape.matches(content):
            yield shape.name, *match.span("secret" if "secret" in match.groupdict() else 0)
    lower = content.lower()
    for place in _PLACES:
        for match in place.matches(lower):
            yield from _at_place(place.name, content, match)
    for header in _HEADERS.matches(lower):
        for match in _COOKIE.finditer(content, *header.span("pairs")):
            if _is_password(match[1], "quoted"):
                yield "cookie", *match.span(1)


def _at_place(kind: str, content: bytes, match: re.Match[bytes]) -> Iterator[Place]:
    group = next(name for name in _GROUPS if match.groupdict().get(name))
    start, end = match.span(group)
    value = content[start:end].rstrip(b".,;:" if group in {"bare", "random"} else b"")
    if value[-1:] in {b")", b"]", b"}"} and not set(value) & set(b"([{"):
        value = value.rstrip(b")]}")
    is_token = group == "random"
    if kind == "literal-of-secret":
        before = content[max(0, start - 512) : start].lower()
        if before.rfind(b"create secret") <= before.rfind(b"create configmap"):
            return
    if kind == "named-secret":
        if not _is_name(match):
            return
        is_token = match["token"] is not None
        before = content[start - 1 : start]
        if group == "bare" and before == b">":  # an element of XML
            group = "quoted"
        elif group == "bare" and before == b"=" and content[slice(*match.span(1))].isupper():
            group = "secret"  # as `env` prints it: no variable
    if is_random(value) if is_token else _is_password(value, group):
        yield kind, start, start + len(value)


def _is_name(match: re.Match[bytes]) -> bool:
    """True if what is before the last word of a name makes it the name of a credential."""
    word, text = match["password"] or match["token"], match.string
    before = text[max(0, match.start() - 48) : match.start()]
    if match["second"] and not _CALL.search(before):
        return False
    return re.search(_BEFORE.get(word, b""), before) is not None


def is_random(value: bytes) -> bool:
    """True for letters and digits in an order that nobody chose."""
    if len(value) < 12 or _is_filler(value):
        return False
    num_runs = len(_RUNS.findall(value.translate(None, b"-_.")))
    has_both = re.search(rb"\d", value) and re.search(rb"[A-Za-z]", value)
    return num_runs >= 4 if has_both else num_runs * 3 > len(value) >= 16


def _is_password(value: bytes, group: str) -> bool:
    """True for a value that may be a password; in code, a word may also be a name or a text."""
    if group == "phrase":
        return True
    if len(value) < 4 or _is_filler(value):
        return False
    is_word = re.fullmatch(rb"[A-Za-z]+", value)
    if group == "quoted":
        return len(value) >= 6 and (not is_word or len(value) >= 12)
    if group == "bare":
        num_runs = len(_RUNS.findall(value.replace(b"_", b"")))
        is_name = re.fullmatch(rb"[A-Za-z_]\w*", value) and num_runs < 4
        is_name = len(_HUMPS.findall(value)) * 4 < max(16, len(value)) if is_word else is_name
        return len(value) >= 6 and not is_name
    return True


def _is_filler(value: bytes) -> bool:
    return bool(_EXPRESSION.search(value) or _WORDS.fullmatch(value))
