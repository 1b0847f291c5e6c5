"""What every Python programmer knows: where names live, what they were called, what packages are called.

Tables only. An entry is a suggestion; the checks that use it prove it before it is offered.
"""

from __future__ import annotations

# Names used without their import, and where they come from.
HOMES: dict[str, str] = {
    **dict.fromkeys(
        ("defaultdict", "Counter", "OrderedDict", "namedtuple", "deque", "ChainMap"), "collections"
    ),
    **dict.fromkeys(
        (
            "Callable",
            "Iterable",
            "Iterator",
            "Generator",
            "Mapping",
            "MutableMapping",
            "Sequence",
            "MutableSequence",
            "Awaitable",
            "Coroutine",
            "AsyncIterator",
            "AsyncGenerator",
            "Hashable",
            "Collection",
        ),
        "collections.abc",
    ),
    **dict.fromkeys(
        (
            "Any",
            "Optional",
            "Union",
            "List",
            "Dict",
            "Tuple",
            "Set",
            "Literal",
            "TypeVar",
            "Generic",
            "Protocol",
            "NamedTuple",
            "TypedDict",
            "ClassVar",
            "Final",
            "Annotated",
            "TYPE_CHECKING",
            "cast",
            "overload",
            "Self",
            "NoReturn",
        ),
        "typing",
    ),
    **dict.fromkeys(
        ("partial", "lru_cache", "cache", "cached_property", "reduce", "wraps", "singledispatch"), "functools"
    ),
    **dict.fromkeys(("dataclass", "field", "asdict", "astuple"), "dataclasses"),
    **dict.fromkeys(
        ("contextmanager", "suppress", "ExitStack", "asynccontextmanager", "closing"), "contextlib"
    ),
    **dict.fromkeys(("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "auto"), "enum"),
    **dict.fromkeys(("ABC", "abstractmethod"), "abc"),
    **dict.fromkeys(("Path", "PurePath", "PosixPath", "PurePosixPath"), "pathlib"),
    **dict.fromkeys(("datetime", "timedelta", "timezone", "date"), "datetime"),
    **dict.fromkeys(("chain", "islice", "product", "permutations", "combinations", "groupby"), "itertools"),
    **dict.fromkeys(("Thread", "Lock", "RLock", "Event"), "threading"),
    **dict.fromkeys(("ThreadPoolExecutor", "ProcessPoolExecutor", "as_completed"), "concurrent.futures"),
    **dict.fromkeys(("sqrt", "floor", "ceil", "isclose", "pi"), "math"),
    **dict.fromkeys(("urlparse", "urlencode", "urljoin", "quote", "unquote"), "urllib.parse"),
    **dict.fromkeys(("itemgetter", "attrgetter"), "operator"),
    **dict.fromkeys(("mean", "median", "stdev"), "statistics"),
    **dict.fromkeys(("StringIO", "BytesIO"), "io"),
    **dict.fromkeys(("randint", "shuffle"), "random"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "dedent": "textwrap",
    "uuid4": "uuid",
    "pprint": "pprint",
    "deepcopy": "copy",
    "ArgumentParser": "argparse",
    "TemporaryDirectory": "tempfile",
    "NamedTemporaryFile": "tempfile",
    "urlopen": "urllib.request",
}

# Short names that stand for one module by convention.
ALIASES: dict[str, str] = {
    "np": "numpy",
    "pd": "pandas",
    "plt": "matplotlib.pyplot",
    "sns": "seaborn",
    "tf": "tensorflow",
    "nn": "torch.nn",
    "ET": "xml.etree.ElementTree",
    "dt": "datetime",
    "sp": "scipy",
}

# What other languages, and Python 2, call things.
FOREIGN: dict[str, str] = {
    "true": "True",
    "false": "False",
    "null": "None",
    "nil": "None",
    "none": "None",
    "NULL": "None",
    "undefined": "None",
    "this": "self",
    "xrange": "range",
    "raw_input": "input",
    "unicode": "str",
    "basestring": "str",
    "unichr": "chr",
    "long": "int",
}

# Methods under the names that other languages give them, by the type that is asked.
FOREIGN_METHODS: dict[str, dict[str, str]] = {
    "list": {"push": "append", "add": "append", "addAll": "extend", "concat": "extend", "indexOf": "index"},
    "dict": {
        "iteritems": "items",
        "itervalues": "values",
        "iterkeys": "keys",
        "viewitems": "items",
        "put": "setdefault",
        "entries": "items",
    },
    "str": {
        "trim": "strip",
        "toLowerCase": "lower",
        "toUpperCase": "upper",
        "startsWith": "startswith",
        "endsWith": "endswith",
        "indexOf": "find",
        "substring": "removeprefix",
        "contains": "__contains__",
        "toLower": "lower",
        "toUpper": "upper",
    },
    "set": {"append": "add", "push": "add", "extend": "update"},
}

# Modules that have moved.
MOVED_MODULES: dict[str, str] = {
    "ConfigParser": "configparser",
    "Queue": "queue",
    "StringIO": "io",
    "cPickle": "pickle",
    "cStringIO": "io",
    "urllib2": "urllib.request",
    "urlparse": "urllib.parse",
    "httplib": "http.client",
    "Tkinter": "tkinter",
    "__builtin__": "builtins",
    "commands": "subprocess",
    "HTMLParser": "html.parser",
    "BaseHTTPServer": "http.server",
    "SocketServer": "socketserver",
    "cookielib": "http.cookiejar",
    "imp": "importlib",
    "Cookie": "http.cookies",
    "thread": "_thread",
    "copy_reg": "copyreg",
    "tomli": "tomllib",
}

# Names that have moved: (module, name) -> module.
MOVED_NAMES: dict[tuple[str, str], str] = {
    **{
        ("collections", name): "collections.abc"
        for name in (
            "Mapping",
            "MutableMapping",
            "Sequence",
            "MutableSequence",
            "Iterable",
            "Iterator",
            "Callable",
            "Hashable",
            "Set",
            "MutableSet",
            "Sized",
            "Container",
            "Generator",
            "Awaitable",
            "Coroutine",
        )
    },
    ("itertools", "izip"): "builtins",
    ("inspect", "getargspec"): "inspect",
    ("fractions", "gcd"): "math",
    ("urllib", "urlopen"): "urllib.request",
    ("urllib", "urlencode"): "urllib.parse",
    ("urllib", "quote"): "urllib.parse",
    ("urllib", "unquote"): "urllib.parse",
    ("string", "maketrans"): "builtins",
    ("typing", "override"): "typing_extensions",
}

# What to install for a module whose package has another name.
PACKAGES: dict[str, str] = {
    "yaml": "PyYAML",
    "cv2": "opencv-python",
    "PIL": "Pillow",
    "sklearn": "scikit-learn",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "jwt": "PyJWT",
    "Crypto": "pycryptodome",
    "serial": "pyserial",
    "git": "GitPython",
    "OpenSSL": "pyOpenSSL",
    "attr": "attrs",
    "skimage": "scikit-image",
    "MySQLdb": "mysqlclient",
    "psycopg2": "psycopg2-binary",
    "google.protobuf": "protobuf",
}
