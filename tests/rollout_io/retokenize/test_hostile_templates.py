"""Templates that never end or make values of any size are refused, and soon."""

import pytest

from rollout_io.retokenize import bounded_templates
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError

SAID = [{"role": "user", "content": "hello"}]
DOUBLED = "{% set x = x ~ x %}" * 64
R = "range(99999)"

ENDLESS = {
    "nested ranges": "{% for a in R %}{% for b in R %}{% endfor %}{% endfor %}",
    "three ranges": "{% for a in R %}{% for b in R %}{% for c in R %}x{% endfor %}{% endfor %}"
    "{% endfor %}",
    "a range with loop": "{% for a in R %}{% for b in R %}{{ loop.index }}{% endfor %}{% endfor %}",
    "a filtered loop": "{% for a in R %}{% for b in R if b < 0 %}{% endfor %}{% endfor %}",
    "two macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a recursive loop": "{% for a in R recursive %}{{ loop(R) }}{% endfor %}",
    "filters": "{% for a in R %}{{ R|map('string')|join|length }}{% endfor %}",
    "sums": "{% for a in R %}{% set x = R|sum %}{% endfor %}",
}
LARGE = {
    "a product": "{{ 'a' * 10**10 }}",
    "a product of a variable": "{% set n = 10**10 %}{{ messages[0].content * n }}",
    "a list": "{% set x = [0] * 10**10 %}",
    "a tuple": "{{ (1, 2) * 10**10 }}",
    "a product reversed": "{{ 10**10 * 'a' }}",
    "doubling": "{% set x = 'aaaa' %}" + DOUBLED,
    "doubling by plus": "{% set x = 'aaaa' %}" + "{% set x = x + x %}" * 64,
    "doubling lists": "{% set x = [1] %}" + "{% set x = x + x %}" * 64,
    "nesting": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 64 + "{{ x }}",
    "nesting dicts": "{% set x = {} %}" + "{% set x = {'a': x, 'b': x} %}" * 64 + "{{ x|tojson }}",
    "nesting calls": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 64 + "{{ x }}",
    "nesting namespaces": "{% set x = namespace() %}"
    + "{% set x = namespace(a=x, b=x) %}" * 64
    + "{{ x }}",
    "blocks": "{% set x %}aaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 64,
    "a namespace": "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "constant": "{{ 'a'|center(9999999999) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a star": "{{ '%*d' % (10**10, 1) }}",
    "the format filter": "{{ '%10000000000d'|format(1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "a format's field": "{{ '{:>{}}'.format(1, 10**10) }}",
    "replacing": "{% set x = 'ab' * 100000 %}{{ x.replace('a', x) }}",
    "replacing nothing": "{% set x = 'ab' * 100000 %}{{ x|replace('', x) }}",
    "joining": "{% set x = 'ab' * 100000 %}{{ x.join(R) }}",
    "the join filter": "{% set x = 'ab' * 100000 %}{{ R|join(x) }}",
    "a batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "json": "{{ [[1]]|tojson(indent=10**10) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set x = 10 %}" + "{% set x = x * x %}" * 64,
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
    "output": "{% for a in range(9999) %}{{ 'a' * 10000 }}{% endfor %}",
}


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load_tokenizer(smollm2_dir)


def rendered(tokenizer, template):
    tokenizer.backend.chat_template = template.replace("R", R)
    return tokenizer.render(SAID)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_stopped_by_its_steps(smollm2, monkeypatch, name):
    monkeypatch.setattr(bounded_templates, "MAX_STEPS", 20_000)
    monkeypatch.setattr(bounded_templates, "MAX_CPU_S", 0.5)
    with pytest.raises(
        RolloutError, match=r"TemplateBoundError: more than|RecursionError"
    ) as caught:
        rendered(smollm2, ENDLESS[name])
    assert caught.value.rule == "chat_template"


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_makes_values_of_any_size_is_stopped_before_it_does(
    smollm2, monkeypatch, name
):
    monkeypatch.setattr(bounded_templates, "MAX_CHARS", 1 << 20)
    with pytest.raises(RolloutError, match="TemplateBoundError") as caught:
        rendered(smollm2, LARGE[name])
    assert caught.value.rule == "chat_template"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
         "1/1True"),
        ("{{ messages[0].content ~ '!' ~ 3 }}", "hello!3"),
        ("{{ '%5d|%-3s' % (3, 'a') }}", "    3|a  "),
        ("{{ 'a' * 3 + 'b' }}{{ 2**10 }}{{ 7 % 4 }}", "aaab10243"),
        ("{% set ns = namespace(x=0) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}"
         "{{ ns.x }}", "3"),
        ("{% for k, v in {'a': [1, 2]}.items() %}{{ k }}{{ v|join(',') }}{% endfor %}", "a1,2"),
        ("{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}"
         "{{ x }}{% endif %}{% endfor %}", "123"),
        ("{{ messages|map(attribute='role')|list|tojson(indent=1) }}", '[\n "user"\n]'),
        ("{{ 'a-b'.split('-')[::-1]|join('+') }}{{ 'x'.replace('x', 'yz') }}", "b+ayz"),
        ("{% generation %}{{ messages[0].content|trim }}{% endgeneration %}", "hello"),
        ("{% macro f(n) %}({{ n }}{{ caller() }}){% endmacro %}{% call f(1) %}x{% endcall %}",
         "(1x)"),
    ],
)  # fmt: skip
def test_bounds_change_no_other_template(smollm2, template, expected):
    assert rendered(smollm2, template) == expected


def test_a_template_is_bounded_when_its_marks_are_read_too(smollm2_dir):
    tokenizer = load_tokenizer(smollm2_dir)
    tokenizer.backend.chat_template = "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}"
    with pytest.raises(RolloutError, match="TemplateBoundError"):
        tokenizer.render_marked(SAID)
