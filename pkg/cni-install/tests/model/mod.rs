//! Models what the commands do to a folder when nothing interrupts them.

use std::collections::BTreeMap;

/// A call of cni-install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    InstallFirst,
    InstallSecond,
    Rollback,
    Original,
    Forget,
    Status,
}

impl Command {
    pub(crate) const CHANGING: [Command; 5] =
        [Command::InstallFirst, Command::InstallSecond, Command::Rollback, Command::Original, Command::Forget];
}

/// The two sets to install. The second has a program that the first lacks, and lacks one that the
/// first has.
pub(crate) const FIRST: [&str; 2] = ["bridge", "tuning"];
pub(crate) const SECOND: [&str; 2] = ["bridge", "portmap"];

/// The content of each program, by its name.
pub(crate) type Programs = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Model {
    pub(crate) folder: Programs,
    pub(crate) installed: Option<Programs>,
    previous: Option<Programs>,
    original: Option<Programs>,
}

fn programs(of: &str, names: &[&str]) -> Programs {
    names.iter().map(|name| ((*name).to_owned(), says(of, name))).collect()
}

/// What the program of that name prints. Those of the second set are equal, as hard links are.
pub(crate) fn says(version: &str, name: &str) -> String {
    if version == "second" { "second".to_owned() } else { format!("{version} {name}") }
}

impl Model {
    /// Returns the model of a folder that cni-install has not changed.
    pub(crate) fn new() -> Model {
        let folder = programs("original", &["bridge", "flannel", "tuning"]);
        Model { folder, installed: None, previous: None, original: None }
    }

    pub(crate) fn after(&self, command: Command) -> Model {
        let mut model = self.clone();
        match command {
            Command::InstallFirst => model.install(programs("first", &FIRST)),
            Command::InstallSecond => model.install(programs("second", &SECOND)),
            Command::Rollback => {
                if let Some(previous) = model.previous.take() {
                    model.folder = previous;
                    model.installed = None;
                    model.original = model.original.filter(|original| *original != model.folder);
                }
            }
            Command::Original => {
                if let Some(original) = model.original.take() {
                    model = Model { folder: original, installed: None, previous: None, original: None };
                }
            }
            Command::Forget => (model.previous, model.original) = (None, None),
            Command::Status => {}
        }
        model
    }

    fn install(&mut self, set: Programs) {
        let there = set.iter().all(|(name, program)| self.folder.get(name) == Some(program));
        if self.installed.as_ref() == Some(&set) && there {
            return;
        }
        self.original.get_or_insert_with(|| self.folder.clone());
        self.previous = Some(self.folder.clone());
        self.folder.extend(set.clone());
        self.installed = Some(set);
    }

    /// Whether the installer has nothing to keep and no state to store.
    pub(crate) fn needs_nothing(&self) -> bool {
        self.installed.is_none() && self.previous.is_none() && self.original.is_none()
    }
}
