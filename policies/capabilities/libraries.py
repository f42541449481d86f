"""What Python's libraries are for, by the names that scripts use of them."""

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXTERNAL_NAMES = _names("""
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
FILE_NAMES = _names("""
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
FILE_CALLS = _names("""
    open read_text write_text read_bytes write_bytes iterdir rglob glob unlink touch mkdir is_file
    read_csv read_excel read_json read_parquet read_table read_fwf read_html read_sql read_pickle
    to_csv to_excel to_parquet to_pickle to_feather savefig imread imsave savetxt
    loadtxt write_html write_image SDMolSupplier SDWriter MolFromMolFile MolFromPDBFile
""")
COMPUTING_NAMES = _names("""
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
NO_COMPUTING_NAMES = _names("""
    numpy.load numpy.save numpy.savez numpy.loadtxt numpy.savetxt numpy.genfromtxt numpy.fromfile
    numpy.set_printoptions random.seed numpy.random.seed scipy.io
    sklearn.datasets.fetch_openml sklearn.datasets.fetch_20newsgroups torch.hub rdkit.rdBase
""")
COMPUTING_CALLS = _names("""
    sum pow divmod mean std var median corr cov groupby pivot_table describe cumsum cumprod
    quantile rolling resample interpolate dot matmul fit predict eigenvals rref
""")
COMPUTING_WORDS = re.compile(
    r"_*(?:solve|simulat|integrat|optimi[sz]e|minimi[sz]e|maximi[sz]e|monte_?carlo|factorial|fib"
    r"|gcd|lcm|is_prime|prime_factors|brute_?force|backtrack|dfs|bfs|calculate|compute)"
)
NUMBER_CALLS = _names("int float abs complex round Fraction Decimal Rational Integer")
"""Who calls these has to do with numbers, so that plus and minus mean sums."""
SHELL_CALLS = _names("""
    os.system os.popen subprocess.run subprocess.call subprocess.check_call
    subprocess.check_output subprocess.Popen subprocess.getoutput subprocess.getstatusoutput
""")
PLACE_CALLS = _names("range slice max min find rfind seek read islice enumerate join")
"""What is added up inside their brackets is most often a place in a text."""
