"""Finds the meta-capabilities that Python code uses.

The code is tokenized, not parsed, because much of it is truncated, wrong or for another version of
Python. A library counts if the code uses it, not if the code only imports it.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from keyword import kwlist
from typing import NamedTuple

from policies.capabilities.programs import (
    COMPUTATION,
    EXTERNAL,
    FILES,
    CapabilityUse,
    CodeFragment,
    merge_uses,
    word_set,
)

# Libraries by name
_EXTERNAL_NAMES = word_set("""
    requests urllib.request urllib3 httpx aiohttp http.client ftplib smtplib telnetlib xmlrpc.client
    websocket websockets socket.create_connection socket.gethostbyname paramiko pycurl wget
    selenium playwright scrapy mechanize feedparser
    huggingface_hub datasets.load_dataset kaggle gdown yfinance pandas_datareader fredapi
    wikipedia wikipediaapi arxiv pubchempy chembl_webresource_client Bio.Entrez bioservices
    openai anthropic boto3 google.cloud git.Repo.clone_from nltk.download torch.hub
    sklearn.datasets.fetch_openml sklearn.datasets.fetch_20newsgroups
    transformers.AutoModel.from_pretrained transformers.AutoTokenizer.from_pretrained
    transformers.pipeline duckduckgo_search googlesearch
""")
_FILE_NAMES = word_set("""
    shutil glob zipfile tarfile gzip bz2 lzma csv tempfile fileinput filecmp linecache fnmatch
    os.listdir os.scandir os.walk os.makedirs os.mkdir os.remove os.unlink os.rename os.replace
    os.rmdir os.removedirs os.stat os.chmod os.symlink os.link os.open os.path.exists
    os.path.isfile os.path.isdir os.path.getsize os.path.getmtime
    json.load json.dump pickle.load pickle.dump yaml.safe_load yaml.dump yaml.load toml.load
    tomllib.load joblib.load joblib.dump configparser sqlite3.connect
    PyPDF2 pypdf pdfplumber pdfminer fitz pymupdf pikepdf docx openpyxl xlrd xlsxwriter pptx
    ebooklib striprtf odf reportlab fpdf ffmpeg pydub midiutil mido music21.converter.parse
    PIL.Image.open cv2.imread cv2.imwrite imageio scipy.io soundfile
    numpy.load numpy.save numpy.savez numpy.loadtxt numpy.savetxt numpy.genfromtxt numpy.fromfile
    Bio.SeqIO.parse Bio.SeqIO.read Bio.SeqIO.write Bio.PDB.PDBParser
    pyarrow.parquet h5py netCDF4
""")
_FILE_CALLS = word_set("""
    open read_text write_text read_bytes write_bytes iterdir rglob glob unlink touch mkdir is_file
    read_csv read_excel read_json read_parquet read_table read_fwf read_html read_sql read_pickle
    to_csv to_excel to_parquet to_pickle to_feather savefig imread imsave savetxt
    loadtxt write_html write_image SDMolSupplier SDWriter MolFromMolFile MolFromPDBFile
""")
_COMPUTING_NAMES = word_set("""
    numpy scipy sympy mpmath math cmath decimal fractions random gmpy2 numba cupy
    sklearn statsmodels torch tensorflow jax autograd networkx ortools pulp cvxpy cvxopt pyomo z3
    pysat constraint deap simpy filterpy control pywt lmfit uncertainties pint sage qutip qiskit
    astropy rdkit openbabel pybel ase pyscf psi4 chempy periodictable molmass thermo cantera
    Bio.Align Bio.SeqUtils Bio.Phylo primer3 lifelines pingouin emcee pymc arch
    statistics bisect.insort heapq itertools.permutations itertools.combinations
    itertools.product itertools.combinations_with_replacement itertools.accumulate
    functools.reduce functools.lru_cache functools.cache operator.mul operator.xor
    hashlib timeit concurrent.futures.ProcessPoolExecutor multiprocessing.Pool
""")
_NON_COMPUTING_NAMES = word_set("""
    numpy.load numpy.save numpy.savez numpy.loadtxt numpy.savetxt numpy.genfromtxt numpy.fromfile
    numpy.set_printoptions random.seed numpy.random.seed scipy.io
    sklearn.datasets.fetch_openml sklearn.datasets.fetch_20newsgroups torch.hub rdkit.rdBase
""")
_COMPUTING_CALLS = word_set("""
    sum pow divmod mean std var median corr cov groupby pivot_table describe cumsum cumprod
    quantile rolling resample interpolate dot matmul fit predict eigenvals rref
""")
_COMPUTING_WORDS = re.compile(
    r"_*(?:solve|simulat|integrat|optimi[sz]e|minimi[sz]e|maximi[sz]e|monte_?carlo|factorial|fib"
    r"|gcd|lcm|is_prime|prime_factors|brute_?force|backtrack|dfs|bfs|calculate|compute)"
)
_NUMBER_CALLS = word_set("int float abs complex round Fraction Decimal Rational Integer")
"""A script that calls one of these handles numbers, so its plus and minus signs are arithmetic."""
_SHELL_CALLS = word_set("""
    os.system os.popen subprocess.run subprocess.call subprocess.check_call
    subprocess.check_output subprocess.Popen subprocess.getoutput subprocess.getstatusoutput
""")
_INDEX_CALLS = word_set("range slice max min find rfind seek read islice enumerate join")
"""Functions in whose arguments arithmetic usually computes an index into a text."""


# Scripts

# No group is repeated possessively because Python before 3.11.4 has a bug there. The alternatives
# inside the groups are disjoint, so no text makes them backtrack.
_TOKEN = re.compile(
    r'''(?P<blank>[ \t\r\f]++|\\\n|\#[^\n]*+)
    | (?P<string>[rRbBuUfFtT]{0,2}(?:
          """(?:[^\\"]++|\\.|"(?!""))*(?:"""|\Z|\\\Z)
        | \'\'\'(?:[^\\']++|\\.|'(?!\'\'))*(?:\'\'\'|\Z|\\\Z)
        | "(?:[^"\\\n]++|\\.)*"?
        | '(?:[^'\\\n]++|\\.)*'?))
    | (?P<name>[^\W\d]\w*+(?:\.[^\W\d]\w*+)*)
    | (?P<number>(?:\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d++)?\w*+)
    | (?P<newline>\n)
    | (?P<sign>\*\*=?|//=?|->|[-+*/%@]=?)
    | (?P<other>.)''',
    re.VERBOSE | re.DOTALL,
)
_STRING = re.compile(r"[a-zA-Z]{0,2}(\"\"\"|'''|\"|')", re.DOTALL)
_KEYWORDS = frozenset(kwlist)
_STRONG_SIGNS = frozenset({"*", "/", "%", "//", "**"})
"""Signs that mean arithmetic between two values. Plus and minus are not among them, because they
often have other uses."""
_OPENING_BRACKETS, _CLOSING_BRACKETS = frozenset("([{"), frozenset(")]}")
_MAX_CALL_TOKENS = 64
"""Maximum number of tokens of a call that are searched for its shell command."""
_MAX_PARTS = 4
"""Maximum number of parts of a dotted name that are looked up."""


class _Token(NamedTuple):
    kind: str
    text: str

    @property
    def begins_value(self) -> bool:
        """True if an arithmetic operand may begin with this token. A string is not an operand."""
        if self.kind == "name":
            return self.text not in _KEYWORDS
        return self.kind == "number" or self.text == "("

    @property
    def ends_value(self) -> bool:
        """True if an arithmetic operand may end with this token."""
        return self.text in (")", "]") or (self.text != "(" and self.begins_value)


_END = _Token("newline", "\n")


def analyse_python(text: str) -> CapabilityUse:
    """Return the capabilities that a script uses."""
    return _Script(text).capability_use()


class _Imports:
    """The imports of a script."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}
        """The full name of each imported name."""
        self.star_modules: set[str] = set()
        """Modules that are imported with `*`."""

    def add(self, statement: str) -> None:
        """Add an import statement."""
        origin, _, names = statement.partition("import ")
        module = origin.removeprefix("from ").strip()
        for item in names.split(","):
            name, _, alias = (part.strip() for part in item.partition(" as "))
            if name == "*":
                self.star_modules.add(module)
            elif module:
                self.origins[alias or name] = f"{module}.{name}"
            elif alias:
                self.origins[alias] = name
            else:
                root = name.partition(".")[0]
                self.origins[root] = root

    def full_name(self, name: str) -> str:
        """Return the full name of an imported name; empty for a name that is not imported."""
        first, dot, rest = name.partition(".")
        return self.origins[first] + dot + rest if first in self.origins else ""


class _Script:
    def __init__(self, text: str) -> None:
        self._imports = _Imports()
        self._body = self._without_imports(_tokens(text))
        names = {token.text for token in self._body if token.kind == "name"}
        # A script that reads a library's version only checks that the library is installed.
        names = {name for name in names if not name.endswith("__version__")}
        full_names = {self._imports.full_name(name) for name in names} | self._imports.star_modules
        self._used_names = [_prefixes(name) for name in full_names]
        self._called_names = {
            token.text.rpartition(".")[2]
            for token, after in pairwise([*self._body, _END])
            if token.kind == "name" and after.text == "("
        }

    def capability_use(self) -> CapabilityUse:
        uses = [CapabilityUse(nested_code=tuple(self._shell_commands()))]
        if any(name & _EXTERNAL_NAMES for name in self._used_names):
            uses.append(EXTERNAL)
        if self._called_names & _FILE_CALLS or any(name & _FILE_NAMES for name in self._used_names):
            uses.append(FILES)
        if self._computes():
            uses.append(COMPUTATION)
        return merge_uses(uses)

    def _without_imports(self, tokens: Sequence[_Token]) -> list[_Token]:
        body: list[_Token] = []
        statement: list[str] = []
        depth, before = 0, _END
        for token in tokens:
            if statement:
                depth += (token.text == "(") - (token.text == ")")
                if token.text == ";" or (token.text == "\n" and depth <= 0):
                    self._imports.add(" ".join(statement))
                    statement = []
                elif token.text not in ("(", ")", "\n"):
                    statement.append(token.text)
            elif before.text in ("\n", ";", ":") and token.text in ("import", "from"):
                statement, depth = [token.text], 0
            else:
                body.append(token)
            before = token
        self._imports.add(" ".join(statement))
        return body

    # Computing

    def _computes(self) -> bool:
        if self._called_names & _COMPUTING_CALLS or any(
            map(_COMPUTING_WORDS.match, self._called_names)
        ):
            return True
        if any(
            name & _COMPUTING_NAMES and not name & _NON_COMPUTING_NAMES for name in self._used_names
        ):
            return True
        return any(self._is_arithmetic(*sign) for sign in _signs_with_neighbours(self._body))

    def _is_arithmetic(self, before: _Token, sign: _Token, after: _Token) -> bool:
        if not (before.ends_value and after.begins_value):
            return False
        operation = sign.text.removesuffix("=")
        if operation in _STRONG_SIGNS:
            return operation != "/" or not any("pathlib" in name for name in self._used_names)
        numbers = [token.text for token in (before, after) if token.kind == "number"]
        if operation not in ("+", "-") or numbers == ["1"]:
            return False
        if len(numbers) == 2 or self._called_names & _NUMBER_CALLS:
            return True
        return not numbers and "range" in self._called_names

    # Commands

    def _shell_commands(self) -> Iterator[CodeFragment]:
        for at, token in enumerate(self._body):
            if token.kind == "name" and self._imports.full_name(token.text) in _SHELL_CALLS:
                words = _first_argument_strings(self._body[at + 1 : at + _MAX_CALL_TOKENS])
                text = words[0] if len(words) == 1 else shlex.join(words)
                yield CodeFragment("shell", text)


def _tokens(text: str) -> list[_Token]:
    found = (_Token(str(token.lastgroup), token.group()) for token in _TOKEN.finditer(text))
    return [token for token in found if token.kind != "blank"]


def _prefixes(name: str) -> frozenset[str]:
    """Return `a`, `a.b` and so on for the name `a.b.c.d`."""
    parts = name.split(".", _MAX_PARTS)[:_MAX_PARTS]
    return frozenset(".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _signs_with_neighbours(body: Sequence[_Token]) -> Iterator[tuple[_Token, _Token, _Token]]:
    """Yield each sign with its neighbours, except in an index into a text or a list, such as
    `text[at - 9 :]`."""
    in_index = [False]
    before = _END
    for token, after in pairwise([*body, _END]):
        if token.text in _OPENING_BRACKETS:
            is_index = token.text == "[" and (before.ends_value or before.kind == "string")
            is_index_call = token.text == "(" and before.text.rpartition(".")[2] in _INDEX_CALLS
            in_index.append(in_index[-1] or is_index or is_index_call)
        elif token.text in _CLOSING_BRACKETS and len(in_index) > 1:
            in_index.pop()
        elif token.kind == "sign" and not in_index[-1]:
            yield before, token, after
        before = token


def _first_argument_strings(tokens: Sequence[_Token]) -> list[str]:
    """Return the strings in a call's first argument, which is a command or a list of its words."""
    words: list[str] = []
    depth = 0
    for token in tokens:
        depth += (token.text in _OPENING_BRACKETS) - (token.text in _CLOSING_BRACKETS)
        if depth <= 0 or (depth == 1 and token.text == ","):
            break
        if token.kind == "string":
            words.append(_unquote(token.text))
        elif token.text == "sys.executable":
            words.append("python3")
    return words


def _unquote(literal: str) -> str:
    opening = _STRING.match(literal)
    assert opening is not None
    return literal[opening.end() :].removesuffix(opening[1]).replace("\\n", "\n")
