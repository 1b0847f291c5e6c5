"""Tables about Python: where names are defined, what they were called earlier, and what to install.

An entry is a candidate for a fix; the code that uses it checks the result before it is shown.
"""

from __future__ import annotations

# Names that are often used without their import, by the module that defines them.
HOMES: dict[str, str] = {
    name: module
    for module, names in {
        "collections": "defaultdict Counter OrderedDict namedtuple deque ChainMap",
        "collections.abc": (
            "Callable Iterable Iterator Generator Mapping MutableMapping Sequence MutableSequence "
            "Awaitable Coroutine AsyncIterator AsyncGenerator Hashable Collection"
        ),
        "typing": (
            "Any Optional Union List Dict Tuple Set Literal TypeVar Generic Protocol NamedTuple "
            "TypedDict ClassVar Final Annotated TYPE_CHECKING cast overload Self NoReturn"
        ),
        "functools": "partial lru_cache cache cached_property reduce wraps singledispatch",
        "dataclasses": "dataclass field asdict astuple",
        "contextlib": "contextmanager suppress ExitStack asynccontextmanager closing",
        "enum": "Enum IntEnum StrEnum Flag IntFlag auto",
        "abc": "ABC abstractmethod",
        "pathlib": "Path PurePath PosixPath PurePosixPath",
        "datetime": "datetime timedelta timezone date",
        "itertools": "chain islice product permutations combinations groupby",
        "threading": "Thread Lock RLock Event",
        "concurrent.futures": "ThreadPoolExecutor ProcessPoolExecutor as_completed",
        "math": "sqrt floor ceil isclose pi",
        "urllib.parse": "urlparse urlencode urljoin quote unquote",
        "operator": "itemgetter attrgetter",
        "statistics": "mean median stdev",
        "io": "StringIO BytesIO",
        "random": "randint shuffle",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "textwrap": "dedent",
        "uuid": "uuid4",
        "pprint": "pprint",
        "copy": "deepcopy",
        "argparse": "ArgumentParser",
        "tempfile": "TemporaryDirectory NamedTemporaryFile",
        "urllib.request": "urlopen",
    }.items()
    for name in names.split()
}

# Conventional short names of modules.
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

# Names of other languages and of Python 2.
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

# Methods by the names they have in other languages, by type.
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

# Renamed modules.
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

_OTHER_ABSTRACT = ("Set", "MutableSet", "Sized", "Container")
# Moved names: (module, name) -> module.
MOVED_NAMES: dict[tuple[str, str], str] = {
    **{
        ("collections", name): "collections.abc"
        for name in (*(name for name, home in HOMES.items() if home == "collections.abc"), *_OTHER_ABSTRACT)
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

# Packages whose name differs from their module's.
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
