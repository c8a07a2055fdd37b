"""Pairs of stages that compute different things, for `test_sameness`.

Each is the source of a module with `stage`, and the same with something replaced. After "helper:" it is replaced
in helper.py, after "pkg:" in pkg/sub.py, after "sched:" in sched.py.
"""

from __future__ import annotations


def read_rows(table: str) -> list[list[str]]:
    """Rows of fields between bars; a pilcrow is a line break, and a row may go on behind it or behind a bar."""
    joined = table.strip().replace("¶\n", "¶").replace("|\n", "| ")
    return [[field.replace("¶", "\n") for field in row.split(" | ")] for row in joined.splitlines()]


HELPER = """
K = 2
TABLE = {'a': 1}
def f(x): return x * K
def g(x): return f(x)
class C:
    k = 3
def __getattr__(name):
    if name == 'dynamic': return K
    raise AttributeError(name)
"""
#: A module of an installed package.
MAKER = """
def make_default(k):
    def f(s, _k=k): return s * _k
    return f
def make_keyword(k):
    def f(s, *, _k=k): return s * _k
    return f
def make_attribute(k):
    def f(s): return s * f.k
    f.k = k
    return f
TABLE = {'a': lambda s: s + 1, 'b': lambda s: s + 2}
"""
#: The descriptions differ: name, source, what is replaced, by what.
_DESCRIBED = """
function of a module | import helper¶def stage(s): return helper.f(s) | helper:x * K | x + K
constant of a module | import helper¶def stage(s): return s * helper.K | helper:K = 2 | K = 5
class of a module | import helper¶def stage(s): return s * helper.C.k | helper:k = 3 | k = 4
table of a module | import helper¶def stage(s): return helper.TABLE['a'] | helper:'a': 1 | 'a': 2
function of a submodule | import pkg.sub¶def stage(s): return pkg.sub.f(s) | pkg:x * 7 | x * 8
module in a local variable | import helper¶def stage(s):¶    h = helper¶    return h.f(s) | helper:x * K | x / K
module as an argument | import helper¶def call(m, s): return m.f(s)¶def stage(s): return call(helper, s) |
helper:x * K | x / K
module in a closure | import helper¶def make(m):¶    def stage(s): return m.f(s)¶    return stage¶
stage = make(helper) | helper:x * K | x / K
module in a default | import helper¶def stage(s, m=helper): return m.f(s) | helper:x * K | x / K
module in a partial | import functools, helper¶def call(s, m): return m.f(s)¶
stage = functools.partial(call, m=helper) | helper:x * K | x / K
import in the function | def stage(s):¶    import helper¶    return helper.f(s) | helper:x * K | x + 1
import from in the function | def stage(s):¶    from helper import f¶    return f(s) | helper:x * K | x + 1
getattr of a module | import helper¶def stage(s): return getattr(helper, 'f')(s) | helper:x * K | x + 1
getattr by a computed name | import helper¶N = 'f'¶def stage(s): return getattr(helper, N.lower())(s) |
helper:x * K | x + 1
attrgetter of a module | import helper, operator¶def stage(s): return operator.attrgetter('K')(helper) |
helper:K = 2 | K = 3
bound dict.get as global | look = {1: 2}.get¶def stage(s): return look(s) | 1: 2 | 1: 3
bound builtin of a set | stage = {1, 2}.__contains__ | {1, 2} | {1, 3}
attribute of a function | def stage(s): return s * stage.k¶stage.k = 2 | k = 2 | k = 3
more than the fields of a dataclass | from dataclasses import dataclass¶@dataclass¶class S:¶    a: int¶
    def __call__(self, s): return self.k¶stage = S(1)¶stage.k = 2 | k = 2 | k = 3
field of a dataclass | from dataclasses import dataclass¶@dataclass¶class S:¶    a: int¶
    def __call__(self, s): return self.a¶stage = S(1) | S(1) | S(2)
field of a slotted dataclass | from dataclasses import dataclass¶@dataclass(slots=True, frozen=True)¶class S:¶
    a: int¶    def __call__(self, s): return self.a¶stage = S(1) | S(1) | S(2)
attribute of a subclass of int | class I(int): pass¶i = I(1)¶i.k = 2¶def stage(s): return s * i.k | k = 2 | k = 3
value of a subclass of int | class I(int): pass¶i = I(1)¶def stage(s): return s * i | I(1) | I(2)
attribute of a subclass of tuple | class T(tuple): pass¶t = T((1,))¶t.k = 2¶def stage(s): return s * t.k |
k = 2 | k = 3
items of a subclass of dict | class D(dict): pass¶d = D(a=1)¶def stage(s): return d['a'] | a=1 | a=2
items of a subclass of list | class L(list): pass¶d = L([1])¶def stage(s): return d[0] | [1] | [2]
subclass against its base | class I(int):¶    def __add__(self, o): return 7¶i = I(1)¶
def stage(s): return i + s | return 7 | return 8
attribute of a metaclass | class M(type):¶    k = 2¶class C(metaclass=M): pass¶def stage(s): return type(C).k |
k = 2 | k = 3
attribute of a base | class B:¶    k = 2¶class C(B): pass¶def stage(s): return C.k | k = 2 | k = 3
mutable attribute of a class | class C:¶    k = [2]¶def stage(s): return C.k[0] | [2] | [3]
order of a bound dict | d = {'a': 1, 'b': 2}¶def stage(s): return list(d) | 'a': 1, 'b': 2 | 'b': 2, 'a': 1
order of keywords | import functools¶def f(s, **k): return list(k)¶stage = functools.partial(f, a=1, b=2) |
a=1, b=2 | b=2, a=1
mutable global | T = [1]¶def stage(s): return T[0] | [1] | [2]
default | def stage(s, k=1): return k | k=1 | k=2
keyword default | def stage(s, *, k=1): return k | k=1 | k=2
constant | def stage(s): return s * 2 | * 2 | * 3
float and int | def stage(s): return s * 2 | * 2 | * 2.0
negative zero | def stage(s): return s * 0.0 | * 0.0 | * -0.0
bool and int | K = 1¶def stage(s): return K | K = 1 | K = True
tuple and list | K = (1,)¶def stage(s): return K | (1,) | [1]
lambda in a list | fs = [lambda s: s * 2]¶def stage(s): return fs[0](s) | * 2 | * 3
comprehension | import helper¶def stage(s): return [helper.f(x) for x in s] | helper:x * K | x + K
what a try covers | def stage(s):¶    s.a()¶    try:¶        s.b()¶    except KeyError:¶        s.c() |     s.a()¶
    try:¶        s.b() |     try:¶        s.a()¶        s.b()
order of parameters | def g(a, b): return a - b¶def stage(s): return g(a=s, b=1) | (a, b) | (b, a)
decorator | import functools¶def twice(f):¶    @functools.wraps(f)¶    def g(s): return f(f(s))¶    return g¶
@twice¶def stage(s): return s + 1 | f(f(s)) | f(s)
decorated function | import torch¶@torch.no_grad()¶def stage(s): return s + 1 | s + 1 | s + 2
cached function | import functools¶@functools.lru_cache¶def stage(s): return s + 1 | s + 1 | s + 2
method | class C:¶    def f(self, s): return s + 1¶stage = C().f | s + 1 | s + 2
state of a method's object | class C:¶    def __init__(self, k): self.k = k¶    def f(self, s): return self.k¶
stage = C(1).f | C(1) | C(2)
class method | class C:¶    k = 1¶    @classmethod¶    def f(cls, s): return cls.k¶stage = C.f | k = 1 | k = 2
static method | class C:¶    @staticmethod¶    def f(s): return s + 1¶stage = C.f | s + 1 | s + 2
property | class C:¶    @property¶    def k(self): return 1¶    def __call__(self, s): return self.k¶
stage = C() | return 1 | return 2
descriptor | class D:¶    def __init__(self, k): self.k = k¶    def __get__(self, o, t): return self.k¶class C:¶
    d = D(1)¶    def __call__(self, s): return self.d¶stage = C() | D(1) | D(2)
enumeration | import enum¶class E(enum.Enum):¶    A = 1¶def stage(s): return E.A.value | A = 1 | A = 2
array | import numpy as np¶A = np.arange(3)¶def stage(s): return A[0] | arange(3) | arange(1, 4)
dtype of an array | import numpy as np¶A = np.zeros(3, 'f4')¶def stage(s): return A | 'f4' | 'f8'
array of objects | import numpy as np¶A = np.array([None, 1], object)¶def stage(s): return A[1] | None, 1 | None, 2
attribute of a subclass of an array | import numpy as np¶class A(np.ndarray): pass¶a = np.zeros(2).view(A)¶
a.k = 1¶def stage(s): return a.k | k = 1 | k = 2
structured array | import numpy as np¶A = np.zeros(2, [('a', 'i4')])¶def stage(s): return A.dtype.names |
('a', | ('b',
tensor | import torch¶T = torch.ones(2)¶def stage(s): return T | ones(2) | zeros(2)
weights of a module | import torch¶torch.manual_seed(0)¶stage = torch.nn.Linear(2, 2) | seed(0) | seed(1)
option of a module | import torch¶stage = torch.nn.LeakyReLU(0.1) | 0.1 | 0.2
installed object | from decimal import Decimal¶K = Decimal('1.0')¶def stage(s): return K | '1.0' | '1.00'
itemgetter | import operator¶stage = operator.itemgetter('a') | 'a' | 'b'
pattern | import re¶P = re.compile('a')¶def stage(s): return P.sub('', s) | 'a' | 'b'
other module by one name | import math as m¶def stage(s): return m.sqrt(s) | import math | import cmath
other function by one name | from math import ceil as f¶def stage(s): return f(s) | import ceil | import floor
vectorized function | import numpy as np¶stage = np.vectorize(lambda s: s + 1) | s + 1 | s + 2
partialmethod | import functools¶class C:¶    def g(self, k, s): return k¶    f = functools.partialmethod(g, 1)¶
stage = C().f | (g, 1) | (g, 2)
default of a defaultdict | import collections¶D = collections.defaultdict(lambda: 1)¶
def stage(s): return D[s] | : 1 | : 2
simple namespace | import types¶N = types.SimpleNamespace(a=1)¶def stage(s): return N.a | a=1 | a=2
name of a function | def g(x): pass¶g.__name__ = 'a'¶def stage(s): return g.__name__ | 'a' | 'b'
wrapped function | def g(s): return s + 1¶def stage(s): return stage.__wrapped__(s)¶stage.__wrapped__ = g |
s + 1 | s + 2
order of a class pattern | class P:¶    __match_args__ = ('a', 'b')¶
    def __init__(self, a, b): self.a, self.b = a, b¶p = P(1, 2)¶def stage(s):¶    match p:¶
        case P(1, b): return b¶    return 0 | ('a', 'b') | ('b', 'a')
patterns | def stage(s):¶    match s:¶        case {'a': 1}: return 2¶        case [1, *_]: return 3 | 'a': 1 |
'a': 2
argument of a generic base | from typing import Generic, TypeVar, get_args¶T = TypeVar('T')¶
class B(Generic[T]): pass¶class C(B[int]): pass¶def stage(s): return get_args(C.__orig_bases__[0])[0](s) |
B[int] | B[float]
function made by exec | ns = {}¶exec('def g(s): return s + 1', ns)¶class C:¶    g = staticmethod(ns['g'])¶
    h = ns['g']¶def stage(s): return C.h(s) | s + 1 | s + 2
comparison of a dataclass | from dataclasses import dataclass, field¶@dataclass¶class D:¶
    a: int = field(compare=True)¶def stage(s): return D(s) == D(1) | compare=True | compare=False
attribute of a member of an enumeration | import enum¶class E(enum.Enum):¶    A = 1¶E.A.k = 2¶
def stage(s): return E.A.k | k = 2 | k = 3
member of an enumeration | import enum¶class E(enum.Enum):¶    A = 1¶    B = 2¶e = E.A¶
def stage(s): return e.value | e = E.A | e = E.B
patched function of a library | import math, helper¶helper.OLD = math.sqrt¶math.sqrt = lambda x: x + 1¶
def stage(s): return math.sqrt(s) | x + 1 | x + 2
patched class of a library | import fractions¶fractions.Fraction.more = lambda self: 1¶F = fractions.Fraction(1)¶
def stage(s): return F.more() | : 1 | : 2
patched builtin | import builtins¶builtins.zzz = lambda x: x + 1¶def stage(s): return zzz(s) | x + 1 | x + 2
global in the body of a class | K = 2¶def stage(s):¶    class C:¶        K = K¶    return C.K | K = 2 | K = 3
bytes and bytearray | K = b'a'¶def stage(s): return K | b'a' | bytearray(b'a')
set and frozenset | K = {1}¶def stage(s): return K | {1} | frozenset({1})
class of a tensor | import torch¶from torchvision import tv_tensors as t¶T = t.Image(torch.zeros(1, 2, 2))¶
def stage(s): return T | t.Image | t.Mask
attribute of a tensor | import torch¶T = torch.zeros(2)¶T.k = 1¶def stage(s): return T.k | k = 1 | k = 2
order of an array in memory | import numpy as np¶A = np.array([[1, 2], [3, 4]], order='C')¶
def stage(s): return A.ravel('K') | 'C' | 'F'
scalar and array | import numpy as np¶A = np.float32(1)¶def stage(s): return A | np.float32(1) |
np.array(1, np.float32)
mask of an array | import numpy as np¶A = np.ma.array([1, 2], mask=[0, 1])¶def stage(s): return A | [0, 1] | [1, 0]
pairs in a subclass of list | class L(list): pass¶A = L([5])¶def stage(s): return A | [5] | [(None, 5)]
option of a cache | import functools¶@functools.lru_cache(typed=True)¶def f(x): return type(x)¶
def stage(s): return f(s) | True | False
attribute of a cached function | import functools¶@functools.lru_cache¶def f(x): return x¶f.k = 1¶
def stage(s): return f.k | k = 1 | k = 2
object pickled by its name | class C:¶    k = 0¶    def __reduce__(self): return 'c'¶c = C()¶c.k = 1¶
def stage(s): return c.k | k = 1 | k = 2
items of a subclass of set | class S(set): pass¶A = S(['a', 'b'])¶def stage(s): return 'a' in A | 'b' | 'c'
methodcaller | import operator¶stage = operator.methodcaller('mul', 2) | 2 | 3
subclass of a named tuple | from typing import NamedTuple¶class T(NamedTuple):¶    a: int¶class U(T):¶
    def f(self): return 1¶u = U(1)¶def stage(s): return u.f() | return 1 | return 2
fields of a named tuple | from collections import namedtuple¶T = namedtuple('T', 'a b')¶t = T(1, 2)¶
def stage(s): return t.a | 'a b' | 'b a'
cached property | import functools¶class C:¶    @functools.cached_property¶    def k(self): return 1¶c = C()¶
def stage(s): return c.k | return 1 | return 2
__getattr__ of a module | import helper¶def stage(s): return helper.dynamic | helper:K = 2 | K = 3
star import | from helper import *¶def stage(s): return f(s) | helper:x * K | x + K
hook of a module | import torch¶m = torch.nn.Identity()¶m.register_forward_hook(lambda m, i, o: o + 1)¶
stage = m | o + 1 | o + 2
buffer that is not saved | import torch¶class M(torch.nn.Module):¶    def __init__(self):¶
        super().__init__()¶        self.register_buffer('b', torch.ones(1), persistent=False)¶
    def forward(self, x): return x + self.b¶stage = M() | ones(1) | zeros(1)
module with a name of Python's | import sched as p¶def stage(s): return p.f(s) | sched:return x | return x + 1
vars of a module | import helper¶def stage(s): return vars(helper)['K'] | helper:K = 2 | K = 3
__dict__ of a module | import helper¶def stage(s): return helper.__dict__['K'] | helper:K = 2 | K = 3
subclass of a path | from pathlib import PosixPath¶class P(PosixPath):¶    k = 1¶p = P('x')¶
def stage(s): return p.k | k = 1 | k = 2
read-only mapping | import types¶M = types.MappingProxyType({'a': 1})¶def stage(s): return M['a'] | 1} | 2}
registered class | import abc¶class B(abc.ABC): pass¶B.register(int)¶def stage(s): return isinstance(s, B) |
(int) | (float)
model of pydantic | import pydantic¶class C(pydantic.BaseModel):¶    a: int = 1¶c = C()¶
def stage(s): return c.a | = 1 | = 2
what __getstate__ leaves out | class C:¶    def __init__(self, k): self.k = k¶
    def __getstate__(self): return {}¶    def __call__(self, s): return self.k¶stage = C(1) | C(1) | C(2)
what __reduce__ leaves out | class C:¶    def __init__(self, k=1): self.k = k¶
    def __reduce__(self): return C, ()¶    def __call__(self, s): return self.k¶stage = C(1) | C(1) | C(2)
object that __getstate__ leaves out | class K:¶    def __init__(self, k): self.k = k¶class C:¶
    def __init__(self): self.k = K(1)¶    def __getstate__(self): return {}¶
    def __call__(self, s): return self.k.k¶stage = C() | K(1) | K(2)
slot that __getstate__ leaves out | class C:¶    __slots__ = ('k',)¶    def __init__(self): self.k = 1¶
    def __getstate__(self): return ()¶    def __call__(self, s): return self.k¶stage = C() | = 1 | = 2
attribute of a subclass of a date | import datetime¶class D(datetime.date): pass¶d = D(2020, 1, 1)¶d.k = 1¶
def stage(s): return d.k | k = 1 | k = 2
default of an installed package's inner function | import maker¶stage = maker.make_default(1) | (1) | (2)
keyword default of an installed package's inner function | import maker¶stage = maker.make_keyword(1) | (1) | (2)
attribute of an installed package's inner function | import maker¶stage = maker.make_attribute(1) | (1) | (2)
lambdas of an installed package | import maker¶stage = maker.TABLE['a'] | 'a' | 'b'
function of a library, patched by a partial | import functools, helper, math¶helper.OLD = math.sqrt¶
math.sqrt = functools.partial(math.pow, 2)¶def stage(s): return math.sqrt(s) | 2 | 3
function of a library, patched by a method | import math¶class C:¶    def __init__(self, k): self.k = k¶
    def f(self, x): return self.k¶math.sqrt = C(2).f¶def stage(s): return math.sqrt(s) | C(2) | C(3)
constant of a library | import math¶math.sqrt = 1¶def stage(s): return math.sqrt | = 1 | = 2
objects that refer to each other | class N:¶    def __init__(self, i): self.i = i¶
    def __call__(self, s): return self.all[5].i¶ns = [N(i) for i in range(40)]¶for n in ns: n.all = [*ns]¶
ns[5].i = 1¶stage = ns[0] | .i = 1 | .i = 2
one list twice and two equal ones | A = [1]¶B = [A, A]¶def stage(s):¶    B[0].append(1)¶    return B[1] |
[A, A] | [A, [1]]
sets in sets of objects | class N:¶    def __init__(self, i): self.i, self.own = i, {(i,), frozenset((i,))}¶
    def __call__(self, s): return self.others¶ns = [N(i) for i in range(9)]¶ns[0].others = set(ns[1:])¶
stage = ns[0] | range(9) | range(10)
long integer | K = 10 ** 5000¶def stage(s): return s * K | ** 5000 | ** 5001
default of a singledispatch | import functools¶@functools.singledispatch¶def stage(s): return 1¶@stage.register¶
def _(s: int): return 2 | return 1 | return 3
case of a singledispatch | import functools¶@functools.singledispatch¶def stage(s): return 1¶@stage.register¶
def _(s: int): return 2 | return 2 | return 3
struct | import struct¶stage = struct.Struct('<i').unpack | <i | >i
local import of what is pure | def stage(s):¶    import os¶    return os.path.join(s, 'a') | 'a' | 'b'
names of paths | import os.path¶from pathlib import Path¶P = Path('x')¶
def stage(s): return P.with_suffix('.a') / os.path.basename(s) | '.a' | '.b'
method of other things than paths | class C:¶    def exists(self): return 1¶c = C()¶
def stage(s): return c.exists() | return 1 | return 2
module that imports os | import helper¶def stage(s, m=helper): return m.f(s) | helper:K = 2 | import os; K = 3
"""
DESCRIBED = {name: (text, old, new) for name, text, old, new in read_rows(_DESCRIBED)}
#: Something is read that no description covers, and that is said: two of them may be different.
_UNSEEN = """
import of what is not there | def stage(s):¶    import nowhere¶    return nowhere.f(s)
globals() | K = 2¶def stage(s): return globals()['K']
eval | K = 2¶def stage(s): return eval('K')
__globals__ | K = 2¶def g(): pass¶def stage(s): return g.__globals__['K']
ufunc of a Python function | import numpy as np¶stage = np.frompyfunc(lambda s: s + 1, 1, 1)
os.environ | import os¶def stage(s): return os.environ['X']
os.getenv | import os¶def stage(s): return os.getenv('X')
environ by from | from os import environ¶def stage(s): return environ['X']
open | def stage(s): return open('x').read()
open under another name | o = open¶def stage(s): return o('x').read()
Path.read_text | from pathlib import Path¶def stage(s): return Path('x').read_text()
importlib | import importlib¶def stage(s): return importlib.import_module('helper').f(s)
sys.modules | import sys, helper¶def stage(s): return sys.modules['helper'].f(s)
generator of an object | import numpy as np¶G = np.random.default_rng(0)¶def stage(s): return G.random()
global that is written | K = 1¶def stage(s):¶    global K¶    K += 1¶    return K
closure that is written | def make(k):¶    def stage(s):¶        nonlocal k¶        k += 1¶        return k¶
    return stage¶stage = make(1)
lock | import threading¶L = threading.Lock()¶K = 1¶def stage(s):¶    with L: return K
open file | F = open(__file__)¶def stage(s): return F.read()
global that is not set yet | def stage(s): return LATER
partial of open | import functools¶stage = functools.partial(open, mode='rb')
gzip.open | import gzip¶def stage(s): return gzip.open('x').read()
subclasses | class B: pass¶class C(B):¶    k = 1¶def stage(s): return B.__subclasses__()[0].k
annotations | def g(x: int): pass¶def stage(s): return g.__annotations__
docstring | def g(x):¶    'a'¶def stage(s): return g.__doc__
quantized tensor | import torch¶T = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)¶
def stage(s): return T
iterator | import itertools¶C = itertools.count(1)¶def stage(s): return next(C)
weak reference | import weakref¶class C:¶    k = 1¶c = C()¶w = weakref.ref(c)¶def stage(s): return w().k
memoryview | M = memoryview(b'ab')¶def stage(s): return M[0]
keys of a dict | K = {'a': 1}.keys()¶def stage(s): return list(K)
objects that refer to each other in sets | class N:¶    def __call__(self, s): return self.all¶
ns = [N() for i in range(12)]¶for n in ns: n.all = set(ns) - {n}¶stage = ns[0]
path of an object | from pathlib import Path¶class C:¶    def __init__(self): self.p = Path('x')¶
    def __call__(self, s): return self.p.stat().st_size¶stage = C()
class method of Path by from | from pathlib import Path¶def stage(s): return Path.cwd()
local import of os | def stage(s):¶    import os¶    return os.environ['X']
os in a local variable | import os¶def stage(s):¶    h = os¶    return h.environ['X']
lock that __getstate__ leaves in | import threading¶class C:¶    def __init__(self): self.lock = threading.Lock()¶
    def __call__(self, s): return s¶stage = C()
"""
_CALLS = """
os.stat('x') os.path.exists('x') os.path.realpath('x') os.listdir('x') os.getpid() os.cpu_count()
zipfile.ZipFile('x') tarfile.open('x') configparser.ConfigParser().read('x') mmap.mmap(3,4) platform.node()
socket.gethostname() subprocess.run('x') subprocess.Popen('x') shutil.which('x') tempfile.gettempdir()
pathlib.Path('x').exists() pathlib.Path.cwd() pathlib.Path('x').glob('*') pathlib.Path('x').resolve()
"""
UNSEEN = dict(read_rows(_UNSEEN))
UNSEEN |= {call: f"import {call.split('.')[0]}\ndef stage(s): return {call}" for call in _CALLS.split()}
