"""Launch scripts are read as bash would run them, without running anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import DescriptionError
from simulator.exchange.megatron.shell import read_script


def words_of(text, **given):
    """The words of the last command of a script."""
    return list(read_script(text, given).commands[-1].words)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run --a 1 \\\n    --b 2", ["run", "--a", "1", "--b", "2"]),
        ("run --a=1 # --b 2", ["run", "--a=1"]),
        ("run 'a b' \"c d\" e\\ f", ["run", "a b", "c d", "e f"]),
        ("run '$X' \"\\$X\" \\$X", ["run", "$X", "$X", "$X"]),
        ('X=8\nrun $X ${X} "$X" x$X', ["run", "8", "8", "8", "x8"]),
        ('X="--a 1 --b 2"\nrun $X', ["run", "--a", "1", "--b", "2"]),
        ('X="--a 1 --b 2"\nrun "$X"', ["run", "--a 1 --b 2"]),
        ("run a 2>&1 | tee log", ["tee", "log"]),
        ("run --a 1 > out.txt --b 2", ["run", "--a", "1", "--b", "2"]),
        ("run \"\" $UNSET '' x", ["run", "", "", "x"]),
        ("export A=1 B=2\nrun $A$B", ["run", "12"]),
        ("A=1 B=2 run $A", ["run", "1"]),
        ("A=--x\nA+=y\nrun $A", ["run", "--xy"]),
        ("F=/data/gpt2.sh\nrun ${F##*/} ${F%.sh} ${F%%/*}x", ["run", "gpt2.sh", "/data/gpt2", "x"]),
    ],
)
def test_words_are_split_quoted_and_expanded(script, words):
    assert words_of(script) == words


def test_an_array_is_as_many_words_as_it_has_and_may_grow():
    script = 'A=( --a 1 # a comment\n  --b "2 3" )\nA+=(--c)\nrun "${A[@]}"'
    assert words_of(script) == ["run", "--a", "1", "--b", "2 3", "--c"]


def test_an_array_without_quotes_is_split_again():
    # as in Megatron-LM's examples: ARGS+=("--fp8-format hybrid"), then ${ARGS[@]}
    assert words_of('A=("--fp8-format hybrid")\nrun ${A[@]}') == ["run", "--fp8-format", "hybrid"]


def test_an_empty_array_is_no_word_even_in_quotes():
    assert words_of('A=()\nrun "${A[@]}" x') == ["run", "x"]


def test_elements_and_lengths_of_arrays_are_known():
    assert words_of("A=(a bc)\nrun ${A[1]} ${#A[@]} $A") == ["run", "bc", "2", "a"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("$((8*4))", "32"), ("$(($A*$B))", "12"), ("$(( A * B + 1 ))", "13"), ("$((7/2))", "3"),
        ("$((${A} / 4 * 5))", "0"), ("$((2**10))", "1024"), ("$((B%3))", "1"),
    ],
)  # fmt: skip
def test_arithmetic_is_of_whole_numbers(expression, value):
    assert words_of(f"A=3\nB=4\nrun {expression}") == ["run", value]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${X:-8}", "8"), ('${X:-"8"}', "8"), ("${1:-8}", "8"), ("${Y:-8}", "5"),
        ("${E:-8}", "8"), ("${E-8}x", "x"), ("${Y:+--on}", "--on"), ("${X:+--on}x", "x"),
        ("${X:=7}", "7"), ("${X:-${Y}}", "5"),
    ],
)  # fmt: skip
def test_defaults_hold_where_a_variable_is_not_set(expression, value):
    assert words_of(f"Y=5\nE=\nrun {expression}") == ["run", value]


def test_what_is_given_holds_whatever_the_script_sets():
    assert words_of("N=1\nN=$((N+1))\nrun $N ${M:-1}", N="16", M="4") == ["run", "16", "4"]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[[ "$D" == "fp8" ]]', True), ('[ "$D" = bf16 ]', False), ("[ $N -gt 1 ]", True),
        ("[ $N -le 1 ]", False), ("[[ $N -eq 8 ]]", True), ('[ -z "$UNSET" ]', True),
        ('[ -n "$D" ]', True), ("[ ! -z $D ]", True), ("[[ $D == fp* ]]", True),
        ('[[ "$D" == "x" ]] || [[ $N -eq 8 ]]', True), ("[[ $D == fp8 && $N -eq 9 ]]", False),
        ('[ "$N" -eq 8 ] && [ "$D" == "fp8" ]', True), ("(( N > 4 ))", True), ("true", True),
        ("false", False), ("[ -z ${DATA+x} ]", True),
    ],
)  # fmt: skip
def test_a_branch_is_taken_as_its_condition_says(condition, holds):
    script = f"D=fp8\nN=8\nif {condition}; then\n  A=yes\nelse\n  A=no\nfi\nrun $A"
    assert words_of(script) == ["run", "yes" if holds else "no"]


@pytest.mark.parametrize(("size", "hidden"), [(7, 4096), (13, 5120), (70, 8192)])
def test_of_several_branches_the_first_that_holds_is_taken(size, hidden):
    script = f"""
        S={size}
        if [[ $S -eq 7 ]]; then H=4096
        elif [[ $S -eq 13 ]]; then H=5120
        elif [[ $S -eq 70 ]]; then H=8192
        else H=0; fi
        run $H"""
    assert words_of(script) == ["run", str(hidden)]


def test_a_case_takes_the_first_pattern_that_fits():
    script = """
        case $SIZE in
          7b|8b) H=4096; L=32 ;;
          70*)
            H=8192
            L=80
            ;;
          *) H=1 ;;
        esac
        run $H $L"""
    assert words_of(script, SIZE="8b") == ["run", "4096", "32"]
    assert words_of(script, SIZE="70b") == ["run", "8192", "80"]
    assert words_of(script, SIZE="x") == ["run", "1"]


def test_branches_in_branches_that_are_left_are_left():
    script = "if false; then if true; then A=1; else A=2; fi; else A=3; fi\nrun $A"
    assert words_of(script) == ["run", "3"]


def test_and_or_decide_whether_a_command_runs():
    script = '[ -z "$X" ] && A=1\n[ -n "$X" ] && A=2\n[ -n "$X" ] || B=3\nrun $A $B'
    assert words_of(script) == ["run", "1", "3"]


def test_what_only_a_run_would_tell_is_left_out_with_a_note():
    script = "if [ -f x.json ]; then\n  A=--file\nfi\nif grep -q y z; then\n  A=--grep\nfi\nrun $A"
    read = read_script(script)
    assert read.commands[-1].words == ("run",)
    assert [note.partition(":")[0] for note in read.notes] == ["line 1", "line 4"]


def test_a_loop_is_not_followed_and_a_note_says_so():
    read = read_script('for x in 1 2; do\n  A+=" $x"\ndone\nrun $A')
    assert read.commands[-1].words == ("run",)
    assert read.notes == ("line 1: a loop is not followed: for x in 1 2",)


def test_a_here_document_and_a_text_for_bash_are_read_too():
    script = 'TP=4\nsbatch <<EOF\nsrun bash -c "python train.py --tp ${TP}"\nEOF\n'
    commands = [c for c in read_script(script).commands if c.words[0] == "python"]
    assert [(c.line, c.words) for c in commands] == [(3, ("python", "train.py", "--tp", "4"))]


def test_an_unknown_value_carries_the_name_of_its_variable():
    (mark,) = words_of("N=$(nvidia-smi -L | wc -l)\nM=$N\nrun $M")[1:]
    assert mark == "\N{REPLACEMENT CHARACTER}N\N{REPLACEMENT CHARACTER}"


def test_nothing_is_run(tmp_path):
    target = tmp_path / "made"
    read_script(f"touch {target}; X=$(touch {target}); `touch {target}`")
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    ["'", '"', "`", "$(", "${", "$((", "A=(", "if", "case", "case x in a", "fi", "done", "esac",
     "[[", "[ ", "((", "<<EOF", "\\", "A=(((", "x)", ";;", "&&", "${A[", '"${A[@]', "a\x00b",
     "if if if", "case x in", "for", "$((1/0))", "$((9**9**9))", "${x:0:3}", "\ufffd"],
)  # fmt: skip
def test_a_text_that_is_cut_off_anywhere_is_read_to_its_end(text):
    read_script(text)
    read_script(f"A=1\n{text}\nB=2 ")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aA=$(){}[]<>|&;'\"`\\ \n#-+:%x1if", max_size=60))
def test_any_text_is_read_to_its_end(text):
    read_script(text)


def test_a_text_that_doubles_itself_is_refused():
    doubling = "A=xxxxxxxx\n" + "A=$A$A\n" * 60
    with pytest.raises(DescriptionError, match="become more than"):
        read_script(doubling)


@pytest.mark.parametrize(
    ("test", "holds"), [('[ "$NO" -eq 0 ]', False), ('[[ "$NO" -eq 0 ]]', True)]
)
def test_nothing_is_0_in_double_brackets_only(test, holds):
    assert words_of(f"A=no\nif {test}; then A=yes; fi\nrun $A") == ["run", "yes" if holds else "no"]
