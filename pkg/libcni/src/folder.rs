//! The folder of network configurations, `/etc/cni/net.d`.
//!
//! A file `*.conflist` has a list of plugins, `*.conf` and `*.json` have a single plugin.
//! Subfolders are not searched for networks, but a list may have further plugins in files `*.conf`
//! of a subfolder with the network's name.
//!
//! An unreadable or invalid file does not prevent the use of other networks, see
//! [`ConfFolder::find`].

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::list::{NetworkList, PluginConf};
use cni::json::Json;
use cni::rollback::Notes;
use cni::{Code, Error, Result, file, ident};

/// A folder of network configurations.
#[derive(Clone, Debug)]
pub struct ConfFolder(PathBuf);

/// A file of the folder, with its content.
#[derive(Debug)]
pub struct ConfFile {
    /// The file's path.
    pub path: PathBuf,
    /// The network's name, or `None` if it could not be read. An invalid file often has a readable
    /// name.
    pub name: Option<String>,
    /// The network, or why the file is invalid.
    pub list: Result<NetworkList>,
}

impl ConfFolder {
    /// Returns the folder at `path`, which does not need to exist.
    pub fn new(path: impl Into<PathBuf>) -> ConfFolder {
        ConfFolder(path.into())
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reads all configuration files, the invalid ones too, and returns them in the order in which
    /// runtimes search them for a network: lists first, and both groups by file name.
    ///
    /// # Errors
    /// Code 5 if the folder exists and cannot be read.
    pub fn files(&self) -> Result<Vec<ConfFile>> {
        let mut paths = list_files(&self.0, &[".conflist", ".conf", ".json"])?;
        // The sort is stable, so each group keeps the order of the names.
        paths.sort_by_key(|path| !is_list(path));
        Ok(paths.into_iter().map(ConfFile::read).collect())
    }

    /// Returns the network `name`: the first list with this name or, if there is none, the first
    /// single plugin with it. Invalid files before that file are reported to `notes`.
    ///
    /// # Errors
    /// - Code 5 if the folder exists and cannot be read.
    /// - The error of an invalid file with the network's name, if it comes before every valid one.
    /// - Code 7 with Go's texts if no file has the network. The details are the errors of the
    ///   invalid files.
    pub fn find(&self, name: &str, notes: &Notes) -> Result<NetworkList> {
        let files = self.files()?;
        if files.is_empty() {
            return Err(Error::config(format!("no net configurations found in {}", self.0.display())));
        }
        let mut invalid: Vec<Error> = Vec::new();
        for file in files {
            match file.list {
                Ok(list) if list.name() == name => {
                    invalid.iter().for_each(|error| notes.note(format_args!("ignored: {error}")));
                    return Ok(list);
                }
                Err(error) if file.name.as_deref() == Some(name) => return Err(error),
                Ok(_) => {}
                Err(error) => invalid.push(error),
            }
        }
        let error = Error::config(format!("no net configuration with name {name:?} in {}", self.0.display()));
        if invalid.is_empty() {
            return Err(error);
        }
        let reasons: Vec<String> = invalid.iter().map(Error::to_string).collect();
        Err(error.with_details(reasons.join("; ")))
    }
}

impl ConfFile {
    /// Reads a file as a list or a single plugin, depending on the suffix of its name. An error is
    /// in the field `list`.
    pub fn read(path: PathBuf) -> ConfFile {
        let raw = match file::read(&path) {
            Ok(raw) => raw,
            Err(error) => {
                let error = Error::caused(Code::IO, format_args!("error reading {}", path.display()), error);
                return ConfFile { path, name: None, list: Err(error) };
            }
        };
        let list = if is_list(&path) { read_list(&path, &raw) } else { NetworkList::parse_single(&raw) };
        let list = list.map_err(|error| error.context(format_args!("failed to load {}", path.display())));
        // If this is not valid JSON, `list` already has the error.
        let name = Json::parse(&raw).ok().and_then(|json| Some(json.get("name")?.as_str()?.to_owned()));
        ConfFile { path, name, list }
    }
}

/// Whether the file's name ends with `.conflist`.
fn is_list(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b".conflist")
}

/// Parses `raw`, the content of the list at `path`, and appends the plugins of the subfolder with
/// the network's name.
fn read_list(path: &Path, raw: &[u8]) -> Result<NetworkList> {
    let mut list = NetworkList::parse_inlined(raw)?;
    // An invalid name could be a path out of this folder. Every verb refuses it later.
    if !list.load_only_inlined && ident::check_network_name(list.name()).is_ok() {
        let folder = path.with_file_name(list.name());
        for path in list_files(&folder, &[".conf"])? {
            let raw = file::read(&path)
                .map_err(|error| Error::caused(Code::IO, format_args!("error reading {}", path.display()), error))?;
            let plugin = PluginConf::parse(&String::from_utf8_lossy(&raw));
            list.plugins.push(plugin.map_err(|error| error.context(path.display()))?);
        }
    }
    list.require_plugins()
}

/// Returns the paths of a folder's files with one of these suffixes, sorted by name. The list is
/// empty if the folder does not exist or is not a directory.
///
/// # Errors
/// Code 5 if the folder cannot be read.
fn list_files(folder: &Path, suffixes: &[&str]) -> Result<Vec<PathBuf>> {
    let mut paths = match paths_in(folder) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => Vec::new(),
        listed => listed
            .map_err(|error| Error::caused(Code::IO, format_args!("failed to list {}", folder.display()), error))?,
    };
    paths.retain(|path| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let has_suffix = suffixes.iter().any(|suffix| name.ends_with(suffix.as_bytes()));
        // A dangling symbolic link has no metadata. It is included, so that reading it reports it.
        has_suffix && fs::metadata(path).map_or(true, |metadata| metadata.is_file())
    });
    Ok(paths)
}

/// Returns the paths of everything in a folder, sorted, or none if the folder does not exist.
pub(super) fn paths_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, ConfFolder) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let conf = ConfFolder::new(folder.path());
        (folder, conf)
    }

    fn list(name: &str, kind: &str) -> String {
        format!(r#"{{"name":"{name}","plugins":[{{"type":"{kind}"}}]}}"#)
    }

    fn kinds(list: &NetworkList) -> Vec<&str> {
        list.plugins().iter().map(PluginConf::kind).collect()
    }

    #[test]
    fn lists_come_before_single_configurations_and_both_by_name() {
        let (_guard, conf) = folder(&[
            ("00.conf", r#"{"name":"n","type":"single"}"#),
            ("20.conflist", &list("n", "second")),
            ("10.conflist", &list("n", "first")),
            ("30.json", r#"{"name":"j","type":"json"}"#),
            ("sub/05.conflist", &list("deep", "x")),
            ("05.txt", &list("text", "x")),
        ]);
        let find = |name| conf.find(name, &Notes::silent());
        assert_eq!(kinds(&find("n").unwrap()), ["first"]);
        assert_eq!(kinds(&find("j").unwrap()), ["json"]);
        assert!(find("deep").is_err() && find("text").is_err());
        let names: Vec<_> =
            conf.files().unwrap().into_iter().map(|file| file.path.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["10.conflist", "20.conflist", "00.conf", "30.json"]);
    }

    #[test]
    fn an_absent_network_gets_gos_text_and_lists_invalid_files() {
        let (guard, conf) = folder(&[]);
        let at = guard.path().display();
        let error = conf.find("n", &Notes::silent()).unwrap_err();
        assert_eq!(error.msg(), format!("no net configurations found in {at}"));
        fs::write(guard.path().join("a.conflist"), "{").unwrap();
        std::os::unix::fs::symlink("/nowhere", guard.path().join("b.conf")).unwrap();
        let error = conf.find("n", &Notes::silent()).unwrap_err();
        assert_eq!(error.msg(), format!("no net configuration with name \"n\" in {at}"));
        assert!(error.details().contains("a.conflist") && error.details().contains("b.conf"), "{}", error.details());
        let nowhere = ConfFolder::new(guard.path().join("absent"));
        assert!(nowhere.find("n", &Notes::silent()).unwrap_err().msg().starts_with("no net configurations found"));
    }

    #[test]
    fn a_broken_file_is_reported_and_hides_no_later_network() {
        let (_guard, conf) = folder(&[("a.conflist", "{"), ("b.conflist", &list("n", "x"))]);
        let lines = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&lines);
        let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
        assert!(conf.find("n", &notes).is_ok());
        assert!(lines.borrow()[0].contains("a.conflist"), "{lines:?}");
    }

    #[test]
    fn the_networks_own_broken_file_is_the_error() {
        let (_guard, conf) = folder(&[("a.conflist", r#"{"name":"n","plugins":[]}"#), ("b.conflist", &list("n", "x"))]);
        let error = conf.find("n", &Notes::silent()).unwrap_err();
        assert!(error.msg().contains("a.conflist") && error.msg().ends_with("no plugins in list"), "{error}");
    }

    #[test]
    fn plugins_of_the_networks_folder_follow_the_inlined_ones() {
        let plugin = |kind: &str| format!(r#"{{"type":"{kind}"}}"#);
        let inlined = |only: &str| format!(r#"{{"name":"n",{only}"plugins":[{{"type":"in"}}]}}"#);
        let beside = [
            ("n/2.conf", plugin("two")),
            ("n/1.conf", plugin("one")),
            ("n/3.json", plugin("no")),
            ("n/s/4.conf", plugin("no")),
        ];
        let find = |text: &str| {
            let mut files: Vec<(&str, &str)> = beside.iter().map(|(name, text)| (*name, text.as_str())).collect();
            files.push(("n.conflist", text));
            let (_guard, conf) = folder(&files);
            conf.find("n", &Notes::silent()).map(|list| kinds(&list).join(" "))
        };
        assert_eq!(find(&inlined("")).unwrap(), "in one two");
        assert_eq!(find(&inlined(r#""loadOnlyInlinedPlugins":true,"#)).unwrap(), "in");
        assert_eq!(find(r#"{"name":"n"}"#).unwrap(), "one two");
        assert!(find(r#"{"name":"n","loadOnlyInlinedPlugins":"true"}"#).is_err());
        assert!(find(r#"{"name":"n","plugins":[]}"#).is_err());
    }
}
