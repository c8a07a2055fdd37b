"""Pairs of stages that compute different things, for `test_sameness`.

Each is the source of a module with `stage`, and the same with something replaced. After "helper:" it is replaced
in helper.py, after "pkg:" in pkg/sub.py, after "sched:" in sched.py.
"""

from __future__ import annotations

# fmt: off
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
#: The descriptions differ.
DESCRIBED: dict[str, tuple[str, str, str]] = {
    'function of a module': ('import helper\ndef stage(s): return helper.f(s)', 'helper:x * K', 'x + K'),
    'constant of a module': ('import helper\ndef stage(s): return s * helper.K', 'helper:K = 2', 'K = 5'),
    'function of a function of a module': (
        'import helper\ndef stage(s): return helper.g(s)', 'helper:x * K', 'x - K'),
    'class of a module': ('import helper\ndef stage(s): return s * helper.C.k', 'helper:k = 3', 'k = 4'),
    'table of a module': ("import helper\ndef stage(s): return helper.TABLE['a']", "helper:'a': 1", "'a': 2"),
    'function of a submodule': ('import pkg.sub\ndef stage(s): return pkg.sub.f(s)', 'pkg:x * 7', 'x * 8'),
    'alias of a module': ('import helper\nh = helper\ndef stage(s): return h.f(s)', 'helper:x * K', 'x / K'),
    'module in a local variable': (
        'import helper\ndef stage(s):\n    h = helper\n    return h.f(s)', 'helper:x * K', 'x / K'),
    'module as an argument': (
        'import helper\ndef call(m, s): return m.f(s)\ndef stage(s): return call(helper, s)',
        'helper:x * K', 'x / K'),
    'module in a closure': (
        'import helper\ndef make(m):\n    def stage(s): return m.f(s)\n    return stage\nstage = make(helper)',
        'helper:x * K', 'x / K'),
    'module in a default': ('import helper\ndef stage(s, m=helper): return m.f(s)', 'helper:x * K', 'x / K'),
    'module in a partial': (
        'import functools, helper\ndef call(s, m): return m.f(s)\nstage = functools.partial(call, m=helper)',
        'helper:x * K', 'x / K'),
    'import in the function': (
        'def stage(s):\n    import helper\n    return helper.f(s)', 'helper:x * K', 'x + 1'),
    'import from in the function': (
        'def stage(s):\n    from helper import f\n    return f(s)', 'helper:x * K', 'x + 1'),
    'import of a submodule in the function': (
        'def stage(s):\n    import pkg.sub\n    return pkg.sub.f(s)', 'pkg:x * 7', 'x + 1'),
    'getattr of a module': (
        "import helper\ndef stage(s): return getattr(helper, 'f')(s)", 'helper:x * K', 'x + 1'),
    'getattr by a computed name': (
        "import helper\nN = 'f'\ndef stage(s): return getattr(helper, N.lower())(s)", 'helper:x * K', 'x + 1'),
    'attrgetter of a module': (
        "import helper, operator\ndef stage(s): return operator.attrgetter('K')(helper)", 'helper:K = 2', 'K = 3'),
    'bound dict.get as global': ('look = {1: 2}.get\ndef stage(s): return look(s)', '1: 2', '1: 3'),
    'bound list.__getitem__': ('look = [1, 2].__getitem__\ndef stage(s): return look(s)', '[1, 2]', '[1, 3]'),
    'bound builtin of a set': ('stage = {1, 2}.__contains__', '{1, 2}', '{1, 3}'),
    'attribute of a function': ('def stage(s): return s * stage.k\nstage.k = 2', 'k = 2', 'k = 3'),
    'more than the fields of a dataclass': (
        'from dataclasses import dataclass\n@dataclass\nclass S:\n    a: int\n'
        '    def __call__(self, s): return self.k\nstage = S(1)\nstage.k = 2', 'k = 2', 'k = 3'),
    'field of a dataclass': (
        'from dataclasses import dataclass\n@dataclass\nclass S:\n    a: int\n'
        '    def __call__(self, s): return self.a\nstage = S(1)', 'S(1)', 'S(2)'),
    'field of a slotted dataclass': (
        'from dataclasses import dataclass\n@dataclass(slots=True, frozen=True)\nclass S:\n    a: int\n'
        '    def __call__(self, s): return self.a\nstage = S(1)', 'S(1)', 'S(2)'),
    'attribute of a subclass of int': (
        'class I(int): pass\ni = I(1)\ni.k = 2\ndef stage(s): return s * i.k', 'k = 2', 'k = 3'),
    'value of a subclass of int': ('class I(int): pass\ni = I(1)\ndef stage(s): return s * i', 'I(1)', 'I(2)'),
    'attribute of a subclass of tuple': (
        'class T(tuple): pass\nt = T((1,))\nt.k = 2\ndef stage(s): return s * t.k', 'k = 2', 'k = 3'),
    'items of a subclass of dict': ("class D(dict): pass\nd = D(a=1)\ndef stage(s): return d['a']", 'a=1', 'a=2'),
    'items of a subclass of list': ('class L(list): pass\nd = L([1])\ndef stage(s): return d[0]', '[1]', '[2]'),
    'subclass against its base': (
        'class I(int):\n    def __add__(self, o): return 7\ni = I(1)\ndef stage(s): return i + s',
        'return 7', 'return 8'),
    'attribute of a metaclass': (
        'class M(type):\n    k = 2\nclass C(metaclass=M): pass\ndef stage(s): return type(C).k', 'k = 2', 'k = 3'),
    'attribute of a base': ('class B:\n    k = 2\nclass C(B): pass\ndef stage(s): return C.k', 'k = 2', 'k = 3'),
    'mutable attribute of a class': ('class C:\n    k = [2]\ndef stage(s): return C.k[0]', '[2]', '[3]'),
    'order of a bound dict': (
        "d = {'a': 1, 'b': 2}\ndef stage(s): return list(d)", "'a': 1, 'b': 2", "'b': 2, 'a': 1"),
    'order of keywords': (
        'import functools\ndef f(s, **k): return list(k)\nstage = functools.partial(f, a=1, b=2)',
        'a=1, b=2', 'b=2, a=1'),
    'mutable global': ('T = [1]\ndef stage(s): return T[0]', '[1]', '[2]'),
    'mutable closure': (
        'def make(t):\n    def stage(s): return t[0]\n    return stage\nstage = make([1])', '[1]', '[2]'),
    'default': ('def stage(s, k=1): return k', 'k=1', 'k=2'),
    'keyword default': ('def stage(s, *, k=1): return k', 'k=1', 'k=2'),
    'constant': ('def stage(s): return s * 2', '* 2', '* 3'),
    'float and int': ('def stage(s): return s * 2', '* 2', '* 2.0'),
    'negative zero': ('def stage(s): return s * 0.0', '* 0.0', '* -0.0'),
    'bool and int': ('K = 1\ndef stage(s): return K', 'K = 1', 'K = True'),
    'tuple and list': ('K = (1,)\ndef stage(s): return K', '(1,)', '[1]'),
    'lambda in a list': ('fs = [lambda s: s * 2]\ndef stage(s): return fs[0](s)', '* 2', '* 3'),
    'comprehension': ('import helper\ndef stage(s): return [helper.f(x) for x in s]', 'helper:x * K', 'x + K'),
    'what a try covers': (
        'def stage(s):\n    s.a()\n    try:\n        s.b()\n    except KeyError:\n        s.c()',
        '    s.a()\n    try:\n        s.b()', '    try:\n        s.a()\n        s.b()'),
    'order of parameters': ('def g(a, b): return a - b\ndef stage(s): return g(a=s, b=1)', '(a, b)', '(b, a)'),
    'decorator': (
        'import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(s): return f(f(s))\n    return g\n'
        '@twice\ndef stage(s): return s + 1', 'f(f(s))', 'f(s)'),
    'decorated function': ('import torch\n@torch.no_grad()\ndef stage(s): return s + 1', 's + 1', 's + 2'),
    'cached function': ('import functools\n@functools.lru_cache\ndef stage(s): return s + 1', 's + 1', 's + 2'),
    'method': ('class C:\n    def f(self, s): return s + 1\nstage = C().f', 's + 1', 's + 2'),
    "state of a method's object": (
        'class C:\n    def __init__(self, k): self.k = k\n    def f(self, s): return self.k\nstage = C(1).f',
        'C(1)', 'C(2)'),
    'class method': (
        'class C:\n    k = 1\n    @classmethod\n    def f(cls, s): return cls.k\nstage = C.f', 'k = 1', 'k = 2'),
    'static method': ('class C:\n    @staticmethod\n    def f(s): return s + 1\nstage = C.f', 's + 1', 's + 2'),
    'property': (
        'class C:\n    @property\n    def k(self): return 1\n    def __call__(self, s): return self.k\n'
        'stage = C()', 'return 1', 'return 2'),
    'descriptor': (
        'class D:\n    def __init__(self, k): self.k = k\n    def __get__(self, o, t): return self.k\nclass C:\n'
        '    d = D(1)\n    def __call__(self, s): return self.d\nstage = C()', 'D(1)', 'D(2)'),
    'enumeration': (
        'import enum\nclass E(enum.Enum):\n    A = 1\ndef stage(s): return E.A.value', 'A = 1', 'A = 2'),
    'method of an enumeration': (
        'import enum\nclass E(enum.Enum):\n    A = 1\n    def f(self): return 1\ndef stage(s): return E.A.f()',
        'return 1', 'return 2'),
    'named tuple': (
        'from typing import NamedTuple\nclass T(NamedTuple):\n    a: int = 1\ndef stage(s): return T().a',
        '= 1', '= 2'),
    'array': ('import numpy as np\nA = np.arange(3)\ndef stage(s): return A[0]', 'arange(3)', 'arange(1, 4)'),
    'dtype of an array': ("import numpy as np\nA = np.zeros(3, 'f4')\ndef stage(s): return A", "'f4'", "'f8'"),
    'array of objects': (
        'import numpy as np\nA = np.array([None, 1], object)\ndef stage(s): return A[1]', 'None, 1', 'None, 2'),
    'attribute of a subclass of an array': (
        'import numpy as np\nclass A(np.ndarray): pass\na = np.zeros(2).view(A)\na.k = 1\n'
        'def stage(s): return a.k', 'k = 1', 'k = 2'),
    'structured array': (
        "import numpy as np\nA = np.zeros(2, [('a', 'i4')])\ndef stage(s): return A.dtype.names",
        "('a',", "('b',"),
    'tensor': ('import torch\nT = torch.ones(2)\ndef stage(s): return T', 'ones(2)', 'zeros(2)'),
    'weights of a module': (
        'import torch\ntorch.manual_seed(0)\nstage = torch.nn.Linear(2, 2)', 'seed(0)', 'seed(1)'),
    'option of a module': ('import torch\nstage = torch.nn.LeakyReLU(0.1)', '0.1', '0.2'),
    'installed object': (
        "from decimal import Decimal\nK = Decimal('1.0')\ndef stage(s): return K", "'1.0'", "'1.00'"),
    'datetime': ('import datetime\nK = datetime.date(2020, 1, 1)\ndef stage(s): return K.day', '1, 1)', '1, 2)'),
    'itemgetter': ("import operator\nstage = operator.itemgetter('a')", "'a'", "'b'"),
    'pattern': ("import re\nP = re.compile('a')\ndef stage(s): return P.sub('', s)", "'a'", "'b'"),
    'other module by one name': (
        'import math as m\ndef stage(s): return m.sqrt(s)', 'import math', 'import cmath'),
    'other function by one name': (
        'from math import ceil as f\ndef stage(s): return f(s)', 'import ceil', 'import floor'),
    'vectorized function': ('import numpy as np\nstage = np.vectorize(lambda s: s + 1)', 's + 1', 's + 2'),
    'partialmethod': (
        'import functools\nclass C:\n    def g(self, k, s): return k\n    f = functools.partialmethod(g, 1)\n'
        'stage = C().f', '(g, 1)', '(g, 2)'),
    'counter': ("import collections\nC = collections.Counter('ab')\ndef stage(s): return C['a']", "'ab'", "'aab'"),
    'default of a defaultdict': (
        'import collections\nD = collections.defaultdict(lambda: 1)\ndef stage(s): return D[s]', ': 1', ': 2'),
    'chain of maps': (
        "import collections\nD = collections.ChainMap({'a': 1})\ndef stage(s): return D['a']", "'a': 1", "'a': 2"),
    'simple namespace': ('import types\nN = types.SimpleNamespace(a=1)\ndef stage(s): return N.a', 'a=1', 'a=2'),
    'name of a function': ("def g(x): pass\ng.__name__ = 'a'\ndef stage(s): return g.__name__", "'a'", "'b'"),
    'wrapped function': (
        'def g(s): return s + 1\ndef stage(s): return stage.__wrapped__(s)\nstage.__wrapped__ = g',
        's + 1', 's + 2'),
    'order of a class pattern': (
        "class P:\n    __match_args__ = ('a', 'b')\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        'p = P(1, 2)\ndef stage(s):\n    match p:\n        case P(1, b): return b\n    return 0',
        "('a', 'b')", "('b', 'a')"),
    'patterns': (
        "def stage(s):\n    match s:\n        case {'a': 1}: return 2\n        case [1, *_]: return 3",
        "'a': 1", "'a': 2"),
    'argument of a generic base': (
        "from typing import Generic, TypeVar, get_args\nT = TypeVar('T')\nclass B(Generic[T]): pass\n"
        'class C(B[int]): pass\ndef stage(s): return get_args(C.__orig_bases__[0])[0](s)', 'B[int]', 'B[float]'),
    'function made by exec': (
        "ns = {}\nexec('def g(s): return s + 1', ns)\nclass C:\n    g = staticmethod(ns['g'])\n    h = ns['g']\n"
        'def stage(s): return C.h(s)', 's + 1', 's + 2'),
    'comparison of a dataclass': (
        'from dataclasses import dataclass, field\n@dataclass\nclass D:\n    a: int = field(compare=True)\n'
        'def stage(s): return D(s) == D(1)', 'compare=True', 'compare=False'),
    'attribute of a member of an enumeration': (
        'import enum\nclass E(enum.Enum):\n    A = 1\nE.A.k = 2\ndef stage(s): return E.A.k', 'k = 2', 'k = 3'),
    'member of an enumeration': (
        'import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ne = E.A\ndef stage(s): return e.value',
        'e = E.A', 'e = E.B'),
    'patched function of a library': (
        'import math, helper\nhelper.OLD = math.sqrt\nmath.sqrt = lambda x: x + 1\n'
        'def stage(s): return math.sqrt(s)', 'x + 1', 'x + 2'),
    'patched class of a library': (
        'import fractions\nfractions.Fraction.more = lambda self: 1\nF = fractions.Fraction(1)\n'
        'def stage(s): return F.more()', ': 1', ': 2'),
    'patched builtin': (
        'import builtins\nbuiltins.zzz = lambda x: x + 1\ndef stage(s): return zzz(s)', 'x + 1', 'x + 2'),
    'global in the body of a class': (
        'K = 2\ndef stage(s):\n    class C:\n        K = K\n    return C.K', 'K = 2', 'K = 3'),
    'bytes and bytearray': ("K = b'a'\ndef stage(s): return K", "b'a'", "bytearray(b'a')"),
    'set and frozenset': ('K = {1}\ndef stage(s): return K', '{1}', 'frozenset({1})'),
    'class of a tensor': (
        'import torch\nfrom torchvision import tv_tensors as t\nT = t.Image(torch.zeros(1, 2, 2))\n'
        'def stage(s): return T', 't.Image', 't.Mask'),
    'attribute of a tensor': (
        'import torch\nT = torch.zeros(2)\nT.k = 1\ndef stage(s): return T.k', 'k = 1', 'k = 2'),
    'order of an array in memory': (
        "import numpy as np\nA = np.array([[1, 2], [3, 4]], order='C')\ndef stage(s): return A.ravel('K')",
        "'C'", "'F'"),
    'order of bytes': (
        "import numpy as np\nA = np.zeros(2, '<i4')\ndef stage(s): return A.dtype", "'<i4'", "'>i4'"),
    'scalar and array': (
        'import numpy as np\nA = np.float32(1)\ndef stage(s): return A',
        'np.float32(1)', 'np.array(1, np.float32)'),
    'mask of an array': (
        'import numpy as np\nA = np.ma.array([1, 2], mask=[0, 1])\ndef stage(s): return A', '[0, 1]', '[1, 0]'),
    'pairs in a subclass of list': (
        'class L(list): pass\nA = L([5])\ndef stage(s): return A', '[5]', '[(None, 5)]'),
    'option of a cache': (
        'import functools\n@functools.lru_cache(typed=True)\ndef f(x): return type(x)\ndef stage(s): return f(s)',
        'True', 'False'),
    'attribute of a cached function': (
        'import functools\n@functools.lru_cache\ndef f(x): return x\nf.k = 1\ndef stage(s): return f.k',
        'k = 1', 'k = 2'),
    'object pickled by its name': (
        "class C:\n    k = 0\n    def __reduce__(self): return 'c'\nc = C()\nc.k = 1\ndef stage(s): return c.k",
        'k = 1', 'k = 2'),
    'items of a subclass of set': (
        "class S(set): pass\nA = S(['a', 'b'])\ndef stage(s): return 'a' in A", "'b'", "'c'"),
    'methodcaller': ("import operator\nstage = operator.methodcaller('mul', 2)", '2', '3'),
    'subclass of a named tuple': (
        'from typing import NamedTuple\nclass T(NamedTuple):\n    a: int\nclass U(T):\n'
        '    def f(self): return 1\nu = U(1)\ndef stage(s): return u.f()', 'return 1', 'return 2'),
    'fields of a named tuple': (
        "from collections import namedtuple\nT = namedtuple('T', 'a b')\nt = T(1, 2)\ndef stage(s): return t.a",
        "'a b'", "'b a'"),
    'cached property': (
        'import functools\nclass C:\n    @functools.cached_property\n    def k(self): return 1\nc = C()\n'
        'def stage(s): return c.k', 'return 1', 'return 2'),
    '__getattr__ of a module': ('import helper\ndef stage(s): return helper.dynamic', 'helper:K = 2', 'K = 3'),
    'star import': ('from helper import *\ndef stage(s): return f(s)', 'helper:x * K', 'x + K'),
    'walrus': ('def stage(s): return (n := s + 1) * n', 's + 1', 's + 2'),
    'coroutine': (
        'async def g(s): return s + 1\ndef stage(s):\n    import asyncio\n    return asyncio.run(g(s))',
        's + 1', 's + 2'),
    'nested comprehensions': (
        'def make(k):\n    def stage(s): return [[x * k for x in y] for y in s]\n    return stage\n'
        'stage = make(1)', 'make(1)', 'make(2)'),
    'hook of a module': (
        'import torch\nm = torch.nn.Identity()\nm.register_forward_hook(lambda m, i, o: o + 1)\nstage = m',
        'o + 1', 'o + 2'),
    'buffer that is not saved': (
        'import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n'
        "        self.register_buffer('b', torch.ones(1), persistent=False)\n"
        '    def forward(self, x): return x + self.b\nstage = M()', 'ones(1)', 'zeros(1)'),
    "module with a name of Python's": (
        'import sched as p\ndef stage(s): return p.f(s)', 'sched:return x', 'return x + 1'),
    'method of an object with a method': (
        'class A:\n    def __init__(self, k): self.k = k\n    def f(self, s): return self.k\nclass B:\n'
        '    def __init__(self, f): self.f = f\n    def g(self, s): return self.f(s)\nstage = B(A(1).f).g',
        'A(1)', 'A(2)'),
    'decorator of a class': (
        'def dec(c):\n    c.k = 1\n    return c\n@dec\nclass C: pass\ndef stage(s): return C.k', 'k = 1', 'k = 2'),
    'vars of a module': ("import helper\ndef stage(s): return vars(helper)['K']", 'helper:K = 2', 'K = 3'),
    '__dict__ of a module': ("import helper\ndef stage(s): return helper.__dict__['K']", 'helper:K = 2', 'K = 3'),
    'default of a method': ('class C:\n    def f(self, s, k=[1]): return k\nstage = C().f', '[1]', '[2]'),
    'subclass of a path': (
        "from pathlib import PosixPath\nclass P(PosixPath):\n    k = 1\np = P('x')\ndef stage(s): return p.k",
        'k = 1', 'k = 2'),
    'read-only mapping': (
        "import types\nM = types.MappingProxyType({'a': 1})\ndef stage(s): return M['a']", '1}', '2}'),
    'registered class': (
        'import abc\nclass B(abc.ABC): pass\nB.register(int)\ndef stage(s): return isinstance(s, B)',
        '(int)', '(float)'),
    'model of pydantic': (
        'import pydantic\nclass C(pydantic.BaseModel):\n    a: int = 1\nc = C()\ndef stage(s): return c.a',
        '= 1', '= 2'),
    'super': (
        'class B:\n    def f(self): return 1\nclass C(B):\n    def __call__(self, s): return super().f()\n'
        'stage = C()', 'return 1', 'return 2'),
    'decorated property': (
        'def prop(f): return property(lambda self: f(self) + 1)\nclass C:\n    @prop\n'
        '    def k(self): return 1\n    def __call__(self, s): return self.k\nstage = C()', '+ 1', '+ 2'),
    '__init_subclass__': (
        'class B:\n    def __init_subclass__(cls, k=0): cls.k = k\nclass C(B, k=1): pass\n'
        'def stage(s): return C.k', 'k=1', 'k=2'),
    'patched module': ('import helper\nhelper.K = 5\ndef stage(s): return helper.f(s)', 'K = 5', 'K = 6'),
    'call of a metaclass': (
        'class M(type):\n    def __call__(cls, s): return 1\nclass C(metaclass=M): pass\nstage = C',
        'return 1', 'return 2'),
    'what __getstate__ leaves out': (
        'class C:\n    def __init__(self, k): self.k = k\n    def __getstate__(self): return {}\n'
        '    def __call__(self, s): return self.k\nstage = C(1)', 'C(1)', 'C(2)'),
    'what __reduce__ leaves out': (
        'class C:\n    def __init__(self, k=1): self.k = k\n    def __reduce__(self): return C, ()\n'
        '    def __call__(self, s): return self.k\nstage = C(1)', 'C(1)', 'C(2)'),
    'object that __getstate__ leaves out': (
        'class K:\n    def __init__(self, k): self.k = k\nclass C:\n    def __init__(self): self.k = K(1)\n'
        '    def __getstate__(self): return {}\n    def __call__(self, s): return self.k.k\nstage = C()',
        'K(1)', 'K(2)'),
    'slot that __getstate__ leaves out': (
        "class C:\n    __slots__ = ('k',)\n    def __init__(self): self.k = 1\n"
        '    def __getstate__(self): return ()\n    def __call__(self, s): return self.k\nstage = C()',
        '= 1', '= 2'),
    'attribute of a subclass of a date': (
        'import datetime\nclass D(datetime.date): pass\nd = D(2020, 1, 1)\nd.k = 1\ndef stage(s): return d.k',
        'k = 1', 'k = 2'),
    **{
        f"{what} of an installed package's inner function": (
            f'import maker\nstage = maker.make_{name}(1)', '(1)', '(2)')
        for what, name in (
            ('default', 'default'), ('keyword default', 'keyword'), ('attribute', 'attribute'))
    },
    "lambdas of an installed package": ("import maker\nstage = maker.TABLE['a']", "'a'", "'b'"),
    'function of a library, patched by a partial': (
        'import functools, helper, math\nhelper.OLD = math.sqrt\n'
        'math.sqrt = functools.partial(math.pow, 2)\ndef stage(s): return math.sqrt(s)', '2', '3'),
    'function of a library, patched by a method': (
        'import math\nclass C:\n    def __init__(self, k): self.k = k\n    def f(self, x): return self.k\n'
        'math.sqrt = C(2).f\ndef stage(s): return math.sqrt(s)', 'C(2)', 'C(3)'),
    'function of a library, patched by a cached one': (
        'import functools, math\nmath.sqrt = functools.lru_cache(lambda x: x + 1)\n'
        'def stage(s): return math.sqrt(s)', '+ 1', '+ 2'),
    'function of a library, patched by one that a library decorates': (
        'import torch, math\nmath.sqrt = torch.no_grad()(lambda x: x + 1)\n'
        'def stage(s): return math.sqrt(s)', '+ 1', '+ 2'),
    'constant of a library': ('import math\nmath.sqrt = 1\ndef stage(s): return math.sqrt', '= 1', '= 2'),
    'objects that refer to each other': (
        'class N:\n    def __init__(self, i): self.i = i\n    def __call__(self, s): return self.all[5].i\n'
        'ns = [N(i) for i in range(40)]\nfor n in ns: n.all = [*ns]\nns[5].i = 1\nstage = ns[0]',
        '.i = 1', '.i = 2'),
    'one list twice and two equal ones': (
        'A = [1]\nB = [A, A]\ndef stage(s):\n    B[0].append(1)\n    return B[1]', '[A, A]', '[A, [1]]'),
    'sets in sets of objects': (
        'class N:\n    def __init__(self, i): self.i, self.own = i, {(i,), frozenset((i,))}\n'
        '    def __call__(self, s): return self.others\nns = [N(i) for i in range(9)]\n'
        'ns[0].others = set(ns[1:])\nstage = ns[0]', 'range(9)', 'range(10)'),
    'long integer': ('K = 10 ** 5000\ndef stage(s): return s * K', '** 5000', '** 5001'),
    'default of a singledispatch': (
        'import functools\n@functools.singledispatch\ndef stage(s): return 1\n@stage.register\n'
        'def _(s: int): return 2', 'return 1', 'return 3'),
    'case of a singledispatch': (
        'import functools\n@functools.singledispatch\ndef stage(s): return 1\n@stage.register\n'
        'def _(s: int): return 2', 'return 2', 'return 3'),
    'struct': ("import struct\nstage = struct.Struct('<i').unpack", '<i', '>i'),
    'local import of what is pure': (
        "def stage(s):\n    import os\n    return os.path.join(s, 'a')", "'a'", "'b'"),
    'names of paths': (
        "import os.path\nfrom pathlib import Path\nP = Path('x')\n"
        "def stage(s): return P.with_suffix('.a') / os.path.basename(s)", "'.a'", "'.b'"),
    'method of other things than paths': (
        'class C:\n    def exists(self): return 1\nc = C()\ndef stage(s): return c.exists()',
        'return 1', 'return 2'),
    'module that imports os': (
        'import helper\ndef stage(s, m=helper): return m.f(s)', 'helper:K = 2', 'import os; K = 3'),
}
#: Something is read that no description covers, and that is said: two of them may be different.
UNSEEN: dict[str, str] = {
    'import of what is not there': 'def stage(s):\n    import nowhere\n    return nowhere.f(s)',
    'globals()': "K = 2\ndef stage(s): return globals()['K']",
    'eval': "K = 2\ndef stage(s): return eval('K')",
    '__globals__': "K = 2\ndef g(): pass\ndef stage(s): return g.__globals__['K']",
    'ufunc of a Python function': 'import numpy as np\nstage = np.frompyfunc(lambda s: s + 1, 1, 1)',
    'os.environ': "import os\ndef stage(s): return os.environ['X']",
    'os.getenv': "import os\ndef stage(s): return os.getenv('X')",
    'environ by from': "from os import environ\ndef stage(s): return environ['X']",
    'open': "def stage(s): return open('x').read()",
    'open of a module': "import io\ndef stage(s): return io.open('x').read()",
    'open under another name': "o = open\ndef stage(s): return o('x').read()",
    'Path.read_text': "from pathlib import Path\ndef stage(s): return Path('x').read_text()",
    'Path.open': "from pathlib import Path\nP = Path('x')\ndef stage(s): return P.open().read()",
    'importlib': "import importlib\ndef stage(s): return importlib.import_module('helper').f(s)",
    'sys.modules': "import sys, helper\ndef stage(s): return sys.modules['helper'].f(s)",
    'generator of an object': 'import numpy as np\nG = np.random.default_rng(0)\ndef stage(s): return G.random()',
    'global that is written': 'K = 1\ndef stage(s):\n    global K\n    K += 1\n    return K',
    'closure that is written': (
        'def make(k):\n    def stage(s):\n        nonlocal k\n        k += 1\n        return k\n'
        '    return stage\nstage = make(1)'),
    'lock': 'import threading\nL = threading.Lock()\nK = 1\ndef stage(s):\n    with L: return K',
    'open file': 'F = open(__file__)\ndef stage(s): return F.read()',
    'global that is not set yet': 'def stage(s): return LATER',
    'getenv by from': "from os import getenv\ndef stage(s): return getenv('X')",
    'import_module by from': "from importlib import import_module as im\ndef stage(s): return im('helper').f(s)",
    'partial of open': "import functools\nstage = functools.partial(open, mode='rb')",
    'gzip.open': "import gzip\ndef stage(s): return gzip.open('x').read()",
    'subclasses': 'class B: pass\nclass C(B):\n    k = 1\ndef stage(s): return B.__subclasses__()[0].k',
    'annotations': 'def g(x: int): pass\ndef stage(s): return g.__annotations__',
    'docstring': "def g(x):\n    'a'\ndef stage(s): return g.__doc__",
    'quantized tensor': (
        'import torch\nT = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)\n'
        'def stage(s): return T'),
    'iterator': 'import itertools\nC = itertools.count(1)\ndef stage(s): return next(C)',
    "generator function's generator": 'def g():\n    yield 1\nC = g()\ndef stage(s): return next(C)',
    'weak reference': (
        'import weakref\nclass C:\n    k = 1\nc = C()\nw = weakref.ref(c)\ndef stage(s): return w().k'),
    'memoryview': "M = memoryview(b'ab')\ndef stage(s): return M[0]",
    'keys of a dict': "K = {'a': 1}.keys()\ndef stage(s): return list(K)",
    **{
        f'{name}.{call}': f'import {name}\ndef stage(s): return {name}.{call}'
        for name, calls in {
            'os': (
                "stat('x')", "path.exists('x')", "path.getsize('x')", "path.getmtime('x')", "path.isdir('x')",
                "path.realpath('x')", "listdir('x')", "scandir('x')", 'getpid()', 'cpu_count()', 'getlogin()'),
            'zipfile': ("ZipFile('x')", "is_zipfile('x')"),
            'tarfile': ("open('x')", "TarFile('x')"),
            'configparser': ("ConfigParser().read('x')",),
            'mmap': ('mmap(3, 4)',),
            'platform': ('node()', 'machine()'),
            'socket': ('gethostname()', "create_connection(('a', 1))"),
            'subprocess': (
                "check_call('x')", "call('x')", "getoutput('x')", "run('x')", "Popen('x')", "check_output('x')"),
            'shutil': ("which('x')",),
            'tempfile': ('gettempdir()',),
            'pathlib': ("Path('x').exists()", 'Path.cwd()', 'Path.home()', "Path('x').stat()",
                        "Path('x').glob('*')", "Path('x').is_file()", "Path('x').resolve()"),
        }.items()
        for call in calls
    },
    'objects that refer to each other in sets': (
        'class N:\n    def __call__(self, s): return self.all\nns = [N() for i in range(12)]\n'
        'for n in ns: n.all = set(ns) - {n}\nstage = ns[0]'),
    'path of a list': "from pathlib import Path\nP = [Path('x')]\ndef stage(s): return P[0].exists()",
    'path of an object': (
        "from pathlib import Path\nclass C:\n    def __init__(self): self.p = Path('x')\n"
        '    def __call__(self, s): return self.p.stat().st_size\nstage = C()'),
    'class method of Path by from': 'from pathlib import Path\ndef stage(s): return Path.cwd()',
    'local import of os': "def stage(s):\n    import os\n    return os.environ['X']",
    'local import of os.path': "def stage(s):\n    from os import path\n    return path.exists('x')",
    'os in a local variable': "import os\ndef stage(s):\n    h = os\n    return h.environ['X']",
    'os as a default': "import os\ndef stage(s, m=os): return m.environ['X']",
    'lock that __getstate__ leaves in': (
        'import threading\nclass C:\n    def __init__(self): self.lock = threading.Lock()\n'
        '    def __call__(self, s): return s\nstage = C()'),
}
