//! Generates completions and man pages from the parser.

use std::fs;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use cni::rollback::Notes;
use cni::{Code, Error};
use cni_multicall::PLUGINS;

use crate::call::{Context, Exit, Streams};
use crate::node::attachments::read_caches;
use crate::node::ipam::IpamContext;
use crate::report::write_raw;

/// Prints the completions for a shell.
///
/// # Errors
/// Code 5 if stdout cannot be written.
pub(crate) fn completions(shell: Shell, mut parser: Command, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut parser, "cnitool", &mut script);
    let script = String::from_utf8_lossy(&script);
    let script = match shell {
        Shell::Bash => format!("{script}{BASH_NAMES}"),
        Shell::Fish => format!("{script}{FISH_NAMES}"),
        Shell::Zsh => script.replacen("\n_cnitool() {", &format!("{ZSH_NAMES}\n_cnitool_verbs() {{"), 1),
        _ => script.into_owned(),
    };
    write_raw(streams, &script).map(|()| Exit::Done)
}

/// Adds the names of networks, containers and addresses to the completions for bash.
const BASH_NAMES: &str = r#"
_cnitool_names() {
    local current=${COMP_WORDS[COMP_CWORD]}
    _cnitool "$@"
    [[ $current == -* ]] && return
    local IFS=$'\n'
    COMPREPLY+=($(compgen -W "$(cnitool complete -- "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)" -- "$current"))
}
complete -F _cnitool_names -o bashdefault -o default cnitool
"#;

/// As [`BASH_NAMES`], for fish.
const FISH_NAMES: &str = "complete -c cnitool -a '(cnitool complete -- (commandline -opc)[2..] 2>/dev/null)'\n";

/// As [`BASH_NAMES`], for zsh. `_cnitool_verbs` is clap's function, which changes `words`.
const ZSH_NAMES: &str = r#"
_cnitool() {
    local -a names
    [[ $PREFIX == -* ]] || names=(${(f)"$(cnitool complete -- "${(@)words[2,CURRENT-1]}" 2>/dev/null)"})
    (( $#names )) && compadd -a names
    _cnitool_verbs "$@" || (( $#names ))
}
"#;

/// Prints the names that the completions add after the words `before`, one in each line: of
/// networks, containers, addresses, namespaces or plugins. Prints no name that a shell could
/// expand. `before` does not have the program's name.
///
/// # Errors
/// Code 5 if a folder cannot be read or stdout cannot be written.
pub(crate) fn complete(before: &[String], context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    const FLAGS: [&str; 4] = ["--json", "--all", "--dry-run", "--watch"];
    let after_container_id = before.last().is_some_and(|word| word == "--container-id");
    let mut words: Vec<&str> = Vec::new();
    let mut is_value = false;
    for word in before {
        let (is_option, is_flag) = (word.starts_with('-'), FLAGS.contains(&word.as_str()));
        words.extend((!is_option && !is_value).then_some(word.as_str()));
        is_value = is_option && !is_flag && !word.contains('=');
    }
    if words.first() == Some(&"explain") {
        words.remove(0);
    }
    let network = words.get(1).copied();
    let names: Vec<String> = match words[..] {
        _ if after_container_id => containers(context, network)?,
        ["inspect", network] => containers(context, Some(network))?,
        ["ipam", "release", network] => {
            let silent = Context { notes: Notes::silent(), ..context.clone() };
            let ipam = IpamContext { context: &silent, data_dir: None, cached: None };
            entries(&ipam.pool_of(network)?.folder())
        }
        ["add" | "check" | "del", _] => {
            entries("/run/netns".as_ref()).iter().map(|n| format!("/run/netns/{n}")).collect()
        }
        ["schema"] => PLUGINS.iter().map(|plugin| plugin.name().to_owned()).collect(),
        ["ipam", "show" | "gc" | "release" | "dhcp"]
        | ["rules", "restore"]
        | ["add" | "check" | "del" | "gc" | "status" | "version" | "validate" | "networks" | "inspect"] => {
            context.networks()?.iter().map(|list| list.name().to_owned()).collect()
        }
        _ => Vec::new(),
    };
    let is_plain = |name: &&String| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:/".contains(&byte));
    let text: String = names.iter().filter(is_plain).map(|name| format!("{name}\n")).collect();
    write_raw(streams, &text).map(|()| Exit::Done)
}

/// Returns the container IDs in the result caches, or only those of a network.
///
/// # Errors
/// Code 5 if a cache cannot be read.
fn containers(context: &Context<'_>, network: Option<&str>) -> Result<Vec<String>, Error> {
    let listed = read_caches(context, network)?.entries.into_iter();
    Ok(listed.map(|entry| entry.attachment.container_id).collect())
}

/// Returns the names of a folder's files.
fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Writes `cnitool.1` and a page for each verb.
///
/// # Errors
/// Code 5 if the folder or a page cannot be written.
pub(crate) fn man(folder: &Path, parser: Command) -> Result<Exit, Error> {
    fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(parser, folder))
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to write into {}", folder.display()), error))
        .map(|()| Exit::Done)
}
