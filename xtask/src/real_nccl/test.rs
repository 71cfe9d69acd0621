//! `real-nccl test`: runs the tests of this workspace on NVIDIA's library, and the tests about that library.
//!
//! The test files of four packages run with the library in place of the emulator's own NCCL, except those of
//! [`LEFT_OUT`]. Test files called `real_…`, and the unit tests of the emulator's module `real`, choose for themselves:
//! they get all libraries.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::environment::Environment;
use super::left_out::{LEFT_OUT, QUICK};
use super::{Asked, FEATURE, each, profiler};
use crate::Result;
use crate::arguments::{Arguments, Usage};
use crate::ep;
use crate::test_files::{TestFile, of_packages};
use crate::wheels::{Release, Unavailable};
use crate::workspace::{self, cargo, run as run_command};

/// The packages of the tests.
const PACKAGES: [&str; 4] = [
    "nccl-emulator",
    "nccl-tests",
    "observability",
    "inference-server",
];
/// The package of the tests about NVIDIA's library, and the prefix of their files.
const OWN: (&str, &str) = ("nccl-emulator", "real_");
/// The filter that selects the unit tests of the emulator's module.
const UNIT: &str = "real";
/// The variables of those tests: the libraries, separated by `:`, NVIDIA's example of a profiler plugin, and the builds of
/// NCCL EP.
const LIBRARIES: &str = "NCCL_REAL_LIBRARIES";
const PROFILER: &str = "NCCL_REAL_EXAMPLE_PROFILER";
const EP: &str = "NCCL_EP_TEST_LIBRARIES";

/// The tests to run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Selection {
    /// Whether to run the unit tests of the emulator's module.
    unit: bool,
    /// Files about the libraries, which get all of them.
    own: Vec<TestFile>,
    /// Files that get the library in place of the emulator's own NCCL.
    on_it: Vec<TestFile>,
}

/// The tests to run when no file is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Every file that is not left out.
    Whole,
    /// The tests about the libraries, and [`QUICK`].
    Quick,
    /// The tests about the libraries alone.
    Own,
}

impl Extent {
    /// Returns whether a file that gets the library in place of the emulator's NCCL is run.
    fn takes(self, file: &TestFile) -> bool {
        match self {
            Self::Whole => true,
            Self::Quick => QUICK.contains(&(&*file.package, file.name())),
            Self::Own => false,
        }
    }
}

impl Selection {
    /// Selects the files with these names, or without names all that are not left out.
    fn of(all: &[TestFile], names: &[String], extent: Extent) -> Result<Self> {
        let left_out = |file: &TestFile| {
            let is = |left: &&(&str, &str, &str)| (left.0, left.1) == (&*file.package, file.name());
            LEFT_OUT.iter().find(is)
        };
        if let Some(unknown) = names
            .iter()
            .find(|name| **name != UNIT && !all.iter().any(|file| file.name() == **name))
        {
            let text = format!(
                "there is no test file `{unknown}` in {}",
                PACKAGES.join(" or ")
            );
            return Err(Usage(text).into());
        }
        let mut selection = Self {
            unit: names.is_empty() || names.iter().any(|name| name == UNIT),
            ..Self::default()
        };
        for file in all {
            let is_named = names.iter().any(|name| name == file.name());
            match left_out(file) {
                Some(_) if names.is_empty() => continue,
                Some(&(.., why)) if is_named => {
                    eprintln!("real-nccl: {} is usually left out: {why}", file.name());
                }
                _ if names.is_empty() || is_named => (),
                _ => continue,
            }
            let is_own =
                file.package == OWN.0 && file.name().starts_with(OWN.1) && left_out(file).is_none();
            if is_own {
                selection.own.push(file.clone());
            } else if !names.is_empty() || extent.takes(file) {
                selection.on_it.push(file.clone());
            }
        }
        Ok(selection)
    }

    /// Returns whether a test uses what [`Others`] has.
    fn needs_others(&self) -> bool {
        self.unit || !self.own.is_empty()
    }
}

pub(super) fn run(asked: &Asked, arguments: &mut Arguments, behind: Vec<OsString>) -> Result {
    let allow_missing = arguments.flag("--allow-missing");
    let allow_missing_sources = arguments.flag("--allow-missing-sources");
    let extent = match (arguments.flag("--quick"), arguments.flag("--own")) {
        (false, false) => Extent::Whole,
        (true, false) => Extent::Quick,
        (false, true) => Extent::Own,
        (true, true) => {
            return Err(Usage("--quick and --own do not go together".to_owned()).into());
        }
    };
    let names: Vec<String> = arguments
        .rest()
        .into_iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    if let Some(option) = names.iter().find(|name| name.starts_with('-')) {
        return Err(Usage(format!("`{option}` is not expected")).into());
    }
    if extent != Extent::Whole && !names.is_empty() {
        let text = "--quick and --own choose the test files, so none can be named".to_owned();
        return Err(Usage(text).into());
    }
    let selection = Selection::of(&of_packages(&PACKAGES)?, &names, extent)?;
    let (release, all) = match libraries(asked) {
        Err(error) if error.is::<Unavailable>() => {
            eprintln!("NOT TESTED: {error}");
            return match allow_missing {
                true => Ok(()),
                false => Err("nothing was tested; --allow-missing takes that for success".into()),
            };
        }
        found => found?,
    };
    // A distribution may drop the sources at any time, so a change must not fail without them.
    let may_lack = allow_missing || extent == Extent::Quick;
    let (profiler, ep) = match selection.needs_others() {
        true => (
            if_there(
                profiler::example(asked.cuda),
                "NVIDIA's example of a profiler plugin",
                may_lack || allow_missing_sources,
                "--allow-missing or --allow-missing-sources",
            )?,
            if_there(
                ep::release(),
                "NVIDIA's NCCL EP",
                may_lack,
                "--allow-missing",
            )?,
        ),
        false => (None, None),
    };
    let others = Others {
        profiler: profiler.as_deref(),
        ep: ep.as_ref(),
    };
    run_all(&selection, &release, &all, others, &behind)
}

/// Returns `None`, with a message, for what cannot be fetched and `may_lack`. Any other error stays one.
fn if_there<T>(found: Result<T>, what: &str, may_lack: bool, option: &str) -> Result<Option<T>> {
    match found {
        Err(error) if error.is::<Unavailable>() => {
            eprintln!("NOT TESTED: {what}: {error}");
            match may_lack {
                true => Ok(None),
                false => Err(format!("{option} goes on without {what}").into()),
            }
        }
        found => found.map(Some),
    }
}

/// What the tests about the libraries use beside them.
struct Others<'a> {
    /// NVIDIA's example of a profiler plugin.
    profiler: Option<&'a Path>,
    /// NCCL EP.
    ep: Option<&'a ep::Release>,
}

/// Returns the library that replaces the emulator's own NCCL, and all libraries.
fn libraries(asked: &Asked) -> Result<(Release, Vec<Release>)> {
    Ok((asked.one()?, asked.all()?))
}

fn run_all(
    selection: &Selection,
    release: &Release,
    all: &[Release],
    others: Others<'_>,
    options: &[OsString],
) -> Result {
    let environment = Environment::new(release, None);
    eprintln!("{environment}");
    let paths = env::join_paths(all.iter().map(|release| &release.library))?;
    let about = |command: &mut Command| {
        environment.apply_network(command.env(LIBRARIES, &paths));
        if let Some(profiler) = others.profiler {
            command.env(PROFILER, profiler);
        }
        if let Some(ep) = others.ep {
            command.env(EP, ep.list());
        }
    };
    let exceptions = each::Exceptions::known()?;
    let mut failed = Vec::new();
    let mut note = |outcome: Result, what: String| {
        if let Err(error) = outcome {
            eprintln!("xtask: {error}");
            failed.push(what);
        }
    };
    if selection.unit {
        let mut command = cargo_test(OWN.0);
        about(command.args(["--lib", "--", "real::"]).args(options));
        note(
            run_command(&mut command),
            format!("unit tests of {}", OWN.0),
        );
    }
    let mut groups = BTreeMap::<(&str, bool), Vec<&TestFile>>::new();
    for (files, is_own) in [(&selection.own, true), (&selection.on_it, false)] {
        for file in files {
            groups
                .entry((&file.package, is_own))
                .or_default()
                .push(file);
        }
    }
    for ((package, is_own), files) in groups {
        let mut command = cargo_test(package);
        let targets: BTreeSet<_> = files.iter().map(|file| &file.target).collect();
        for target in targets {
            command.args(["--test", target]);
        }
        let names: Vec<_> = files.iter().map(|file| file.name()).collect();
        let what = format!("{package}: some of {}", names.join(", "));
        if is_own {
            command.arg("--").args(options);
            about(&mut command);
            note(run_command(&mut command), what);
            continue;
        }
        let each_options = each::Options::parse(options)?;
        command.args(["--no-run", "--message-format=json-render-diagnostics"]);
        let built = each::Built::of_messages(&workspace::output(&mut command)?);
        let built = each::Built::of_files(&built, &files);
        let way = each::Way {
            limit: each::Way::LIMIT,
            under: &[],
            prepare: &|command| environment.apply(command),
        };
        note(each::run(&built, &exceptions, &each_options, &way), what);
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("failed on NVIDIA's library: {}", failed.join("; ")).into()),
    }
}

fn cargo_test(package: &str) -> Command {
    let mut command = cargo();
    let feature = match package {
        "nccl-emulator" => "real-nccl",
        _ => FEATURE,
    };
    command.args(["test", "--no-fail-fast", "--package", package]);
    command.args(["--features", feature]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Vec<TestFile> {
        let file = |package: &str, target: &str, module: Option<&str>| TestFile {
            package: package.to_owned(),
            target: target.to_owned(),
            module: module.map(str::to_owned),
        };
        vec![
            file("nccl-emulator", "real_faults", None),
            file("nccl-emulator", "real_symbols", None),
            file("nccl-tests", "api", Some("collectives")),
            file("nccl-tests", "compile_fail", None),
        ]
    }

    fn select(names: &[&str]) -> Result<Selection> {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        Selection::of(&some(), &names, Extent::Whole)
    }

    fn names(files: &[TestFile]) -> Vec<&str> {
        files.iter().map(TestFile::name).collect()
    }

    #[test]
    fn all_files_are_run_but_for_those_that_are_left_out() {
        let selection = select(&[]).unwrap();
        assert!(selection.unit);
        assert_eq!(names(&selection.own), ["real_faults"]);
        assert_eq!(names(&selection.on_it), ["collectives"]);
    }

    #[test]
    fn files_that_are_named_are_run_and_no_others() {
        let selection = select(&["compile_fail"]).unwrap();
        assert_eq!(names(&selection.on_it), ["compile_fail"]);
        assert!(!selection.unit && selection.own.is_empty());
        assert!(!selection.needs_others());
        let selection = select(&["real", "real_faults"]).unwrap();
        assert!(selection.unit && selection.on_it.is_empty() && selection.needs_others());
        assert_eq!(names(&selection.own), ["real_faults"]);
    }

    #[test]
    fn a_short_run_has_the_tests_about_the_libraries_and_a_few_others() {
        let own = Selection::of(&some(), &[], Extent::Own).unwrap();
        assert_eq!(names(&own.own), ["real_faults"]);
        assert!(own.unit && own.on_it.is_empty());
        let quick = Selection::of(&some(), &[], Extent::Quick).unwrap();
        assert!(quick.on_it.is_empty());
    }

    #[test]
    fn each_file_of_a_quick_run_is_there_and_not_left_out() {
        let all = of_packages(&PACKAGES).unwrap();
        let selection = Selection::of(&all, &[], Extent::Quick).unwrap();
        assert_eq!(selection.on_it.len(), QUICK.len());
    }

    #[test]
    fn a_file_that_there_is_not_is_wrong_usage() {
        assert!(select(&["colectives"]).unwrap_err().is::<Usage>());
    }

    #[test]
    fn what_cannot_be_fetched_may_be_missing_and_what_fails_is_an_error() {
        let missing = || -> Result<u8> { Err(Unavailable("no mirror".to_owned()).into()) };
        let without = |found, may_lack| if_there(found, "the example", may_lack, "--option");
        assert_eq!(without(missing(), true).unwrap(), None);
        let error = without(missing(), false).unwrap_err().to_string();
        assert!(error.contains("--option"), "{error}");
        assert_eq!(without(Ok(7), false).unwrap(), Some(7));
        let error = without(Err("it does not compile".into()), true).unwrap_err();
        assert_eq!(error.to_string(), "it does not compile");
    }

    #[test]
    fn each_file_that_is_left_out_is_there() {
        let all = of_packages(&PACKAGES).unwrap();
        for (package, name, _) in LEFT_OUT {
            let is = |file: &TestFile| (&*file.package, file.name()) == (*package, *name);
            assert!(all.iter().any(is), "{package} has no tests {name}");
        }
    }
}
