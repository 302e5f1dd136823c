"""Completion in zsh."""

from __future__ import annotations

import shlex

from accel_cli.completion.tables import Dialect

DIALECT = Dialect(
    head='{name}() {{\n    case "$1" in',
    case="    {value}) {print} ;;",
    foot="    esac\n}",
    quote=shlex.quote,
    hints=True,
)

HEAD = "#compdef {programs}"

DRIVER = r"""
_accelerate_spell() {
    local body="${1#--}"
    case "$1" in
    --*) print -r -- "--${body//-/_}" ;;
    *) print -r -- "$1" ;;
    esac
}

_accelerate_offer() {
    case "$1" in
    :anything) ;;
    :file) _files ;;
    :folder) _files -/ ;;
    *) local -a values; values=("${(@f)1}"); compadd -a values ;;
    esac
}

# words, each followed by a tab and its description
_accelerate_describe() {
    local line; local -a names shown
    for line in "${(@f)1}"; do
        names+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
    done
    compadd -l -d shown -a names
}

_accelerate() {
    local program="${words[1]:t}" current="${words[CURRENT]}"
    local command="${program#accelerate}" pending="" another="" word flags index
    command="${command#-}"
    for ((index = 2; index < CURRENT; index++)); do
        word="${words[index]}"
        if [[ -n "$pending" ]]; then
            pending=""
        elif [[ "$word" == --*=* ]]; then
            continue
        elif [[ "$word" == -* ]]; then
            pending="$(_accelerate_values "$command $(_accelerate_spell "$word")")"
        elif _accelerate_commands "$command" | cut -f1 | grep -qxF -e "$word"; then
            command="${command:+$command }$word"
        elif [[ -n "$(_accelerate_runs_another "$command")" ]]; then
            another=yes
            break
        fi
    done
    if [[ -n "$another" ]]; then
        _files
    elif [[ -n "$pending" ]]; then
        _accelerate_offer "$pending"
    elif [[ "$current" == --*=* ]]; then
        pending="$(_accelerate_values "$command $(_accelerate_spell "${current%%=*}")")"
        compset -P 1 '*='
        [[ -n "$pending" ]] && _accelerate_offer "$pending"
    elif [[ "$current" == -* ]]; then
        flags="$(_accelerate_flags "$command")"
        # a flag begun with hyphens is completed with hyphens
        if [[ "${current#--}" == *-* ]]; then
            flags="$(print -r -- "$flags" | awk -F'\t' -v OFS='\t' '{ gsub("_", "-", $1); print }')"
        fi
        _accelerate_describe "$flags"
    elif [[ -n "$(_accelerate_commands "$command")" ]]; then
        _accelerate_describe "$(_accelerate_commands "$command")"
    else
        word="$(_accelerate_argument "$command")"
        _accelerate_offer "${word:-:anything}"
    fi
}

if [[ "${funcstack[1]-}" == _accelerate ]]; then
    _accelerate "$@"
else
    compdef _accelerate {programs}
fi
""".strip()
