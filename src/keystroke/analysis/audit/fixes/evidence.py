"""Decides whether a fix is safe to apply or only a suggestion.

A fix is safe if the program itself shows that its harmless behaviour stays the same. The rule names the
evidence its fix needs; what is missing becomes the sentence that the suggestion is shown with. Without
evidence a fix is never safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from keystroke.analysis.audit.fixes.site import ChangedValue, FixSite
from keystroke.analysis.audit.flow.values import REMOTE
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir

# Where the text of one field comes from that a client sent.
_CLIENT_TEXT = {
    "python": re.compile(
        r"request\.(?:args|form|values|GET|POST|cookies|COOKIES|headers|META|query_params|query|params|forms|"
        r"match_info|view_args|path_params|matchdict)\b|self\.get_(?:query_|body_)?argument\(\)$"
    ),
    "javascript": re.compile(
        r"^(?:req|request|ctx)\.(?:query|params|body|cookies|headers|header\(\)|get\(\)|param\(\)|url|path|"
        r"originalUrl|hostname)\b|"
        r"location\.(?:search|hash|href|pathname)$|searchParams|^URLSearchParams|"
        r"document\.(?:referrer|URL|cookie|documentURI)$|^window\.name$"
    ),
    "go": re.compile(
        r"\.(?:FormValue|PostFormValue|Param|Query|PostForm|DefaultQuery|QueryParam|Params|Get)\(\)|"
        r"\bVars\(\)|\.(?:Form|PostForm|Header|URL)\b"
    ),
    "java": re.compile(
        r"\b(?:getParameter|getHeader|getQueryString|getPathInfo|getRequestURI|getRemoteUser)\(\)"
    ),
}
_FIELDS = re.compile(
    r"request\.(?:args|form|values|GET|POST|FILES|files|cookies|COOKIES|headers|META|query_params|path_params|"
    r"json|data|body|params|view_args)$"
)
# Values that are markup on purpose, or the name of what is written in another language.
_MARKUP_NAME = re.compile(
    r"(?i)html|markup|markdown|body|content|render|snippet|svg|embed|page|template|widget|fragment|node|"
    r"element|\bel\b|script|css|style|block|view|layout|message|rich|raw|safe"
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>?|[\w-]+=[\"']$")
# Remarks of the author that the code is as it must be.
_DELIBERATE = re.compile(
    r"(?i)\b(?:rfc\s*\d+|protocol|compat\w*|legacy|required by|by design|deliberate\w*|intention\w*|"
    r"on purpose|must (?:be|stay|match|use)|spec(?:ification)?\b|backwards?|interop\w*|"
    r"do not (?:change|escape)|trusted|nosec|noqa|nosemgrep|nolint|lgtm|eslint-disable|pylint:\s*disable|"
    r"not security|not secret)"
)
_COMMENT = re.compile(r"(?:#|//|/\*|^\s*\*)(.*)")


def missing_evidence(site: FixSite, spec: FixSpec) -> str:
    """What the fix may change, or "" if the program shows that it is safe."""
    if spec.suggest:
        return spec.changes
    if site.match.known is None and not site.match.rule.id.startswith(("c-", "cpp-")):
        return "what the values are is not known here"
    # str() of a text that is not ASCII fails there, so fixers that convert values count too.
    if site.family == "python" and (spec.imports or spec.wrap or spec.fixer) and _runs_on_python_2(site):
        return "the code also runs on Python 2, where the replacement is missing or differs"
    remark = _remark(site)
    if remark:
        return f"a comment explains the code: {remark}"
    replaced = _replaced_by_tests(site)
    if replaced:
        return f"the project's tests replace `{replaced}` and may check how it is called"
    for name in spec.evidence:
        kind, _, detail = name.partition(":")
        reason = _CHECKS[kind](site, detail)
        if reason:
            return reason
    return ""


_PYTHON_2 = re.compile(
    r"(?m)^\s*print\s+(?!\()[\w\"'%]|^\s*print\s*>>|^\s*except\s+[\w.()]+\s*,\s*\w+\s*:|^\s*raise\s+\w+\s*,"
    r"|\b(?:unicode|xrange|raw_input|basestring)\b|\.(?:has_key|iteritems|itervalues)\(|\bPY[23]\b|<>|\bur['\"]"
)
_PYTHON_2_MODULE = re.compile(
    r"(?:urllib2|urlparse|commands|ConfigParser|c?StringIO|cPickle|httplib|Queue|Cookie|Tkinter|__builtin__|six|"
    r"future|builtins|popen2|md5|sha|sets)(?:\.|$)"
    r"|__future__\.(?:print_function|unicode_literals|absolute_import|division|with_statement)"
)


def _runs_on_python_2(site: FixSite) -> bool:
    """Whether the syntax, the imports or the project say that the code is for Python 2, also or only."""
    if _PYTHON_2.search(site.text) or any(map(_PYTHON_2_MODULE.match, site.imports)):
        return True
    return site.project is not None and site.project.runs_on_python_2


def _remark(site: FixSite) -> str:
    """The comment on the lines of the match, or directly above, that says the code is deliberate."""
    line = site.text.rfind("\n", 0, site.match.start) + 1
    above = site.text.rfind("\n", 0, max(line - 1, 0)) + 1
    end = site.text.find("\n", site.match.end)
    for number, text in enumerate(site.text[above : end if end >= 0 else len(site.text)].split("\n")):
        if number == 0 and above < line and not text.lstrip().startswith(("#", "//", "*", "/*")):
            continue
        found = _COMMENT.search(text)
        if found is not None and _DELIBERATE.search(found[1]):
            return found[1].strip()[:80]
    return ""


def _replaced_by_tests(site: FixSite) -> str:
    if site.project is None or site.call is None:
        return ""
    name = site.method
    return name if name and name in site.project.replaced else ""


# Evidence that rules name. Each check returns what is missing, or "".


def _same(site: FixSite, detail: str) -> str:
    """The fix computes the same for every input that is no attack."""
    return ""


def _library(site: FixSite, detail: str) -> str:
    """The callee belongs to one of the named libraries, by the imports of the file."""
    path = site.path or (site.value(site.match.node).path if site.match.node is not None else "")
    names = detail.split(",")
    found = next((name for name in names if path == name or path.startswith(f"{name}.")), None)
    if found is None:
        return f"it is not known that this is {names[0]}"
    root = found.split(".", 1)[0]
    if not any(item == root or item.startswith((f"{root}.", f"{root}/")) for item in site.imports):
        return f"{root} is not imported here"
    if re.search(rf"(?m)^\s*(?:class|def|function)\s+{re.escape(path.rsplit('.', 1)[-1])}\b", site.text):
        return "the file defines a name like it"
    return ""


def _client_text(site: FixSite, detail: str) -> str:
    """Every changed value is one field of a request or an address, read directly."""
    pattern = _CLIENT_TEXT.get(site.family)
    if not site.changed or pattern is None:
        return "it is not known what the changed values hold"
    for changed in site.changed:
        value = site.value(changed.node)
        source = changed.node.text()
        if value.level < REMOTE or not value.origin or value.built:
            return f"it is not known that `{source}` is text from a client"
        if site.family == "python" and value.path == value.origin and _FIELDS.search(value.path):
            return f"`{source}` is no single text"
        direct = value.path.startswith(value.origin) or _is_view_parameter(value.path, value.origin)
        if not direct or not (
            pattern.search(value.origin)
            or pattern.search(value.path)
            or _is_view_parameter(value.path, value.origin)
        ):
            return f"it is not known that `{source}` is plain text"
    return ""


def _is_view_parameter(path: str, origin: str) -> bool:
    """A parameter of a route: its origin is its own name."""
    return bool(origin) and path == origin and origin.isidentifier()


def _markup(site: FixSite, detail: str) -> str:
    """Every changed value is put between constant tags, and nothing says that it is markup itself."""
    for changed in site.changed:
        source = changed.node.text()
        if not _TAG.search(changed.before) and not _TAG.search(changed.after):
            return f"`{source}` may be a whole page, or text that is not shown as HTML"
        if _MARKUP_NAME.search(_key_of(site, changed)):
            return f"`{source}` may be markup on purpose"
    if re.search(r"(?i)text/plain|application/json|\bContent-?Type\b", _function_text(site)):
        return "the response may not be HTML"
    return "" if site.changed else "nothing shows that the value is text"


def _key_of(site: FixSite, changed: ChangedValue) -> str:
    """The names by which a value is known: the variable or field, and the field it was read from."""
    value = site.value(changed.node)
    source = changed.node.text()
    keys = re.findall(r"[\"'](\w+)[\"']", source) or re.findall(r"\w+", re.sub(r"\(.*", "", source))[-1:]
    return " ".join([*keys, *value.path.removeprefix(value.origin).replace("()", "").split(".")[-1:]])


def _quoted(site: FixSite, detail: str) -> str:
    """Every changed value is inside single quotes: it is one text there, and not words, patterns or code."""
    for changed in site.changed:
        if changed.before.count("'") % 2 == 0 or changed.before.count('"') % 2:
            return f"`{changed.node.text()}` may be more than one plain text"
        if _ESCAPED.search(_function_text(site)):
            return "the function may escape the value already"
    return "" if site.changed else "it is not known what the values hold"


_ESCAPED = re.compile(r"(?i)escape|quot|replace(?:All)?\(")


def _file_name(site: FixSite, detail: str) -> str:
    """Every changed value is a name that a client or an archive gave, behind a folder of the program."""
    if "zip-slip" in site.match.rule.id:
        return ""
    return _client_text(site, "")


def _driver(site: FixSite, detail: str) -> str:
    """The statement is run by the imported driver, which takes any value as text, and not by a class of the
    project.
    """
    call = site.call
    if call is None or not isinstance(call.func, ir.AttrExpr):
        return "it is not known what runs the statement"
    if site.changed and _TAKES_PARAMETERS.match(site.changed[0].before) is None:
        return "databases take parameters in queries and changes of rows, and not in every other statement"
    if any(item.split(".", 1)[0] == "asyncpg" or "/pgx" in item for item in site.imports):
        return "the driver takes only values of the column's type"
    base = call.func.base
    root = site.match.evaluate(base).path.split(".", 1)[0].removesuffix("()")
    if root and any(item == root or item.startswith((f"{root}.", f"{root}/")) for item in site.imports):
        return "" if not root.startswith(".") else "the class that runs the statement is the project's own"
    name = ir.last_name(base) if not isinstance(base, ir.CallExpr) else ir.last_name(base.func)
    annotated = re.search(rf"\b{re.escape(name)}\s*:\s*[\"']?(\w+)\.", _function_text(site))
    if annotated and any(item.split(".", 1)[0] == annotated[1] for item in site.imports):
        return ""
    if not re.fullmatch(r"(?i)\w*?_*(?:cur|curs|cursor|conn|connection)\d?", name):
        return f"it is not known that `{name}` belongs to the imported driver"
    return ""


_TAKES_PARAMETERS = re.compile(r"(?i)\s*(?:select|insert|update|delete|replace|with)\b")


def _unseeded(site: FixSite, detail: str) -> str:
    """Nothing makes the numbers repeatable."""
    if re.search(r"(?i)seed|repeatab|reproduc|determinis|\brng\b|simulat|synthetic", _function_text(site)):
        return "the numbers may have to be repeatable"
    if re.search(r"\brandom\.seed\(", site.text) or (
        site.project is not None and site.project.mentions("random.seed(")
    ):
        return "the project starts the numbers with a seed"
    return ""


def _secret(site: FixSite, detail: str) -> str:
    """The number is part of a secret: by its name, or because letters and digits are drawn for a token."""
    node = site.match.node
    line = site.text[site.text.rfind("\n", 0, site.match.start) + 1 : site.match.end]
    names = f"{_function_text(site).split('(', 1)[0]} {line}"
    if _SECRET_NAME.search(names):
        return ""
    if _TOKEN_NAME.search(names) and _CHARACTERS.search(site.source(node)):
        return ""
    return "the numbers may be no secret, and may have to be repeatable"


_SECRET_NAME = re.compile(
    r"(?i)passw|secret|csrf|(?<![a-z])(?:otp|nonce)(?![a-z])|(?:api|access|auth|session|reset|login|bearer)_?(?:token|key)"
)
_TOKEN_NAME = re.compile(r"(?i)token|salt|session|captcha|(?<![a-z])(?:pin|sid|code|key)(?![a-z])")
_CHARACTERS = re.compile(r"string\.(?:ascii_|digits|hexdigits|letters)|[0-9]{10}|(?i:abcdef)")


def _since_python(site: FixSite, detail: str) -> str:
    """The project declares a Python version that has the parameter."""
    major, _, minor = detail.partition(".")
    oldest = site.project.python if site.project is not None else None
    if oldest is None:
        return f"the parameter needs Python {detail}; the project does not say which version it needs"
    if oldest < (int(major), int(minor)):
        return f"the parameter needs Python {detail}; the project supports {oldest[0]}.{oldest[1]}"
    return ""


_MODERN_SCRIPT = re.compile(r"(?m)\basync\s|\bawait\s|^import\s.*\bfrom\b|\?\.\w|\.\.\.\w|[\"']node:")
_MODERN_NODE = 7  # the oldest Node.js that runs such a script
_ASKED_FEATURE = re.compile(r"Buffer\.\w+\s*(?:\?|&&|\|\||[!=]==?)|typeof Buffer\.|!\s*Buffer\.\w+\b(?!\()")


def _since_node(site: FixSite, detail: str) -> str:
    """The project declares a Node.js that has the function, or the file is written for one."""
    if _ASKED_FEATURE.search(site.text):
        return "the file asks whether the function exists, so it runs where it does not"
    oldest = site.project.node if site.project is not None else None
    if oldest is None and int(detail) <= _MODERN_NODE and _MODERN_SCRIPT.search(site.text):
        return ""
    if oldest is None or oldest < int(detail):
        return f"the function needs Node.js {detail}, which nothing here declares"
    return ""


def _project_lacks(site: FixSite, detail: str) -> str:
    """None of these texts occurs in the project."""
    if site.project is None:
        return "other files of the project may depend on it"
    for word in detail.split(","):
        if site.project.mentions(word):
            return f"the project uses `{word}`"
    return ""


def _not_a_format(site: FixSite, detail: str) -> str:
    """The printed value is no format that the program passes on."""
    for node in site.arguments():
        if re.search(r"(?i)fmt|format|usage|help|template", node.text()):
            return f"`{node.text()}` may be a format that the program itself writes"
    return ""


def _not_beside(site: FixSite, detail: str) -> str:
    """The function does not call the replacement elsewhere: if it does, it chose not to use it here."""
    if re.search(rf"\b{re.escape(detail)}\s*\(", _function_text(site)):
        return f"the function calls {detail} elsewhere, and not here"
    return ""


def _written_here(site: FixSite, detail: str) -> str:
    """The file is opened for writing in the same function."""
    node = site.match.node
    parent = node.parent() if node is not None else None
    target = parent.field("left") if parent is not None and parent.kind() == "assignment" else None
    if target is not None and re.search(
        rf"\bopen\(\s*{re.escape(target.text())}\s*,\s*(?:mode\s*=\s*)?[\"']w", _function_text(site)
    ):
        return ""
    return "the file would exist before another program creates it"


def _function_text(site: FixSite) -> str:
    text: str = site.enclosing_function(site.match.node).text()
    return text


_CHECKS: dict[str, Callable[[FixSite, str], str]] = {
    "same": _same,
    "library": _library,
    "client-text": _client_text,
    "markup": _markup,
    "quoted": _quoted,
    "file-name": _file_name,
    "driver": _driver,
    "unseeded": _unseeded,
    "secret": _secret,
    "since-python": _since_python,
    "since-node": _since_node,
    "project-lacks": _project_lacks,
    "not-a-format": _not_a_format,
    "written-here": _written_here,
    "not-beside": _not_beside,
}
EVIDENCE = frozenset(_CHECKS)
