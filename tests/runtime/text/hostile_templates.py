"""Chat templates that try to take a machine's time or memory, or to get at Python; knows nothing of what stops them."""

from __future__ import annotations

# What a first attack found to hang or to take gigabytes.
EXAMPLES = [
    "{{ 1|round(30000000, 'ceil') }}",
    "{{ (1).from_bytes([255] * 8000000, 'big') // (1).from_bytes([255] * 4000000, 'big') }}",
    "{{ ['a' * 1000000] * 90000 | max }}",
    "{{ (['a' * 1000000] * 90000) | max }}",
    "{% set n = namespace(x=[]) %}{% for i in range(900) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=16) }}",
    "{{ strftime_now('%200Y' * 2000000) }}",
]
# Endless work.
LOOPS = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% macro f(n) %}{{ caller() }}{% call f(n) %}{{ caller() }}{% endcall %}{% endmacro %}"
    "{% call f(1) %}x{% endcall %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) if range(99999) | select('eq', 1) | list %}{% endfor %}",
    "{% for i in range(99999) %}{% set y = range(99999) | list %}{% endfor %}",
    "{% for i in range(99999) %}{% set y = 7 in range(99999) | map('string') | list %}{% endfor %}",
]
TOO_LARGE = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ 10 ** 10 * 'x' }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 2 ** 4000 ** 2 }}",
    "{{ ['a' * 1000000] * 90000000 }}",
    "{% set n = namespace(x=10) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='é') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
]
_GROW = "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = STEP %}{% endfor %}"
# Texts that double in every step, and values that share parts, so that walking them takes 2 ** 99 steps.
_GROWING = [
    _GROW.replace("START", start).replace("STEP", step) + use
    for start, step, use in (
        ("'aaaaaaaaaa'", "n.x ~ n.x", ""),
        ("'a'", "(n.x | safe) + '<<<<'", ""),
        ("'a,'", "n.x.replace('a', n.x)", ""),
        ("'ab'", "n.x | list | join(n.x)", ""),
        ("'ab'", "n.x.join([n.x, n.x])", ""),
        ("'ab'", "'{0}{0}{0}'.format(n.x)", ""),
        ("'ab'", "[n.x, n.x, n.x] | tojson", ""),
        ("{}", "dict(n.x, a=n.x, b=n.x)", "{{ n.x }}"),
        ("[1]", "[n.x, n.x]", "{{ n.x }}"),
        ("[1]", "[n.x, n.x]", "{{ n.x == [[n.x, n.x], [n.x, n.x]][0] }}"),
        ("(1, 2)", "(n.x, n.x)", "{{ {n.x: 1} }}"),
        ("(1, 2)", "(n.x, n.x)", "{{ [n.x, n.x] | unique | list }}"),
        ("{'a': 1}", "{'a': n.x, 'b': n.x}", "{{ n.x | tojson }}"),
        ("{'a': 1}", "{'a': n.x, 'b': n.x}", "{{ raise_exception(n.x) }}"),
    )
]
_OPERATIONS = [
    "{{ range(10 ** 9) }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('aa', 60) }}",
    "{% filter upper %}{% for i in range(99999) %}{{ 'ß' * 9999 }}{% endfor %}{% endfilter %}",
    "{{ ('a' * 1000).replace('', 'b' * 1000000) }}",
    "{{ range(99999) | join('a' * 100000) }}",
    "{{ ('\n' * 99999) | indent(999999) }}",
    "{{ ('é' * 7000000) | list }}",
    "{{ [['x' * 100000] * 1000] * 1000 }}",
    "{{ ([range(99999) | list] * 9999) | sum(start=[]) }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{{ x.rsplit('b' ~ 'a' * 500000) }}",
    "{% set x = 'a' * 1000000 %}{{ ([x ~ 'b', x ~ 'c'] * 40000) | sort }}",
    "{{ ('9' * 4000000) | int }}",
    "{{ messages | map(attribute='9' * 90000) | list }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*.*f' % (1, 1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('{0:999}' * 99999).format(1) }}",
    "{{ ('{' * 4000000).format(1) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ strftime_now('%Y' * 4000000) }}",
    "{{ 'a' | batch(1000000000) | list }}",
    "{{ lipsum(1000000000) }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% extends 'x' %}",
    "{{ '{}'.format(*([1] * 7000000)) }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages.sort() }}",
    "{{ messages[0].update({}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].clear() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{% macro f() %}{% endmacro %}{{ f._environment }}",
    "{% for i in [1] %}{{ loop._iterable }}{% endfor %}",
    "{% for i in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% set n = namespace() %}{{ n.__class__ }}",
    "{% set n = namespace() %}{{ n['_Namespace__attrs'] }}",
    "{{ (messages | select).gi_frame }}",
    "{{ (1).__class__ }}",
    "{{ none.__class__ }}",
    "{{ messages[0].items().__class__ }}",
]
HOSTILE = [*EXAMPLES, *LOOPS, *TOO_LARGE, *_GROWING, *_OPERATIONS, *ESCAPES]
