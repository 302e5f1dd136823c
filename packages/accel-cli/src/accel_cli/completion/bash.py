"""Completion in bash."""

from __future__ import annotations

import shlex

from accel_cli.completion.tables import Dialect

DIALECT = Dialect(
    head='{name}() {{\n    case "$1" in',
    case="    {value}) {print} ;;",
    foot="    esac\n}",
    quote=shlex.quote,
    hints=False,
)

# bash breaks words at "=", so that `--flag=value` comes as three of them
DRIVER = r"""
_accelerate_spell() {
    case "$1" in
    --*) local body="${1#--}"; printf '%s' "--${body//-/_}" ;;
    *) printf '%s' "$1" ;;
    esac
}

_accelerate_offer() {
    local kind="$1" current="$2"
    case "$kind" in
    :anything) ;;
    :file | "") compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current")) ;;
    :folder) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$current")) ;;
    *) COMPREPLY=($(compgen -W "$kind" -- "$current")) ;;
    esac
}

_accelerate() {
    local IFS=$'\n'
    local program="${COMP_WORDS[0]##*/}" current="${COMP_WORDS[COMP_CWORD]}"
    local command="${program#accelerate}" pending="" another="" word flags index
    command="${command#-}"
    COMPREPLY=()
    [ "$current" = "=" ] && current=""
    for ((index = 1; index < COMP_CWORD; index++)); do
        word="${COMP_WORDS[index]}"
        [ "$word" = "=" ] && continue
        if [ -n "$pending" ]; then
            pending=""
        elif [[ "$word" == -* ]]; then
            pending="$(_accelerate_values "$command $(_accelerate_spell "$word")")"
        elif _accelerate_commands "$command" | grep -qxF -e "$word"; then
            command="${command:+$command }$word"
        elif [ -n "$(_accelerate_runs_another "$command")" ]; then
            another=yes
            break
        fi
    done
    if [ -n "$another" ]; then
        _accelerate_offer :file "$current"
    elif [ -n "$pending" ]; then
        _accelerate_offer "$pending" "$current"
    elif [[ "$current" == -* ]]; then
        flags="$(_accelerate_flags "$command")"
        # a flag begun with hyphens is completed with hyphens
        if [[ "${current#--}" == *-* ]]; then
            flags="$(printf '%s\n' "$flags" | sed -e 's/_/-/g')"
        fi
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
    elif [ -n "$(_accelerate_commands "$command")" ]; then
        COMPREPLY=($(compgen -W "$(_accelerate_commands "$command")" -- "$current"))
    else
        word="$(_accelerate_argument "$command")"
        _accelerate_offer "${word:-:anything}" "$current"
    fi
}

complete -F _accelerate {programs}
""".strip()
