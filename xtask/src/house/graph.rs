//! The uses between files, and the definitions of names.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{File, Sources};

pub(super) struct Graph {
    /// The room of each file: the first part of its module, or the file's own name in the root.
    room_of: Vec<String>,
    paths: Vec<String>,
    /// For each file, the files that it uses.
    uses: Vec<BTreeSet<usize>>,
}

/// The most `use` items that a name is followed through.
const HOPS: u32 = 8;

pub(super) fn of(sources: &Sources) -> Graph {
    let files = &sources.files;
    let modules = Modules::of(sources);
    let uses = files
        .iter()
        .enumerate()
        .map(|(at, file)| {
            let globs = file.globs.iter().map(|(_, other)| other);
            let named = file.imports.values().chain(&file.paths).chain(globs);
            let mut used: BTreeSet<usize> = named
                .filter_map(|path| Some(modules.resolve(path)?.0))
                .collect();
            used.remove(&at);
            used
        })
        .collect();
    let room = |file: &File| file.module.first().cloned().unwrap_or_default();
    Graph {
        room_of: files.iter().map(room).collect(),
        paths: files.iter().map(|file| file.path.clone()).collect(),
        uses,
    }
}

/// The files of a crate by their modules.
pub(super) struct Modules<'a> {
    files: &'a [File],
    by_path: BTreeMap<&'a [String], usize>,
}

impl<'a> Modules<'a> {
    pub(super) fn of(sources: &'a Sources) -> Self {
        let files = &sources.files[..];
        let by_path = files.iter().enumerate();
        let by_path = by_path.map(|(at, file)| (&file.module[..], at)).collect();
        Self { files, by_path }
    }

    /// Returns the file that defines the item of a path, and the item's path there.
    pub(super) fn resolve(&self, path: &[String]) -> Option<(usize, Vec<String>)> {
        let mut path = path.to_vec();
        for _ in 0..HOPS {
            match self.further(&path) {
                Some(further) if further != path => path = further,
                _ => break,
            }
        }
        let (depth, at) = self.file_of(&path);
        // In the root, a name that is not a module of the crate is another crate, or a macro.
        (depth > 0 || path.is_empty()).then_some((at, path))
    }

    /// Returns the file of a path, and the number of parts of the path that are its module.
    fn file_of(&self, path: &[String]) -> (usize, usize) {
        let depths = (0..=path.len()).rev();
        let mut found =
            depths.filter_map(|depth| Some((depth, *self.by_path.get(&path[..depth])?)));
        found.next().unwrap_or((0, 0))
    }

    /// Returns the path that a `use` item substitutes for a path.
    fn further(&self, path: &[String]) -> Option<Vec<String>> {
        let (depth, at) = self.file_of(path);
        let file = &self.files[at];
        for depth in depth + 1..=path.len() {
            if let Some(import) = file.imports.get(&path[..depth]) {
                return Some([&import[..], &path[depth..]].concat());
            }
        }
        // A name that is not imported is defined in the file, or imported by a glob.
        file.globs.iter().find_map(|(module, other)| {
            let rest = path.strip_prefix(&module[..])?;
            let is_own = file.items.contains(path.get(..=module.len())?);
            let further = [&other[..], rest].concat();
            (!is_own && self.has(&further[..=other.len()])).then_some(further)
        })
    }

    fn has(&self, path: &[String]) -> bool {
        let file = &self.files[self.file_of(path).1];
        file.module == path || file.items.contains(path) || file.imports.contains_key(path)
    }
}

impl Graph {
    pub(super) fn rooms(&self) -> usize {
        self.names().len()
    }

    fn names(&self) -> BTreeSet<&str> {
        let rooms = self.room_of.iter().map(String::as_str);
        rooms.filter(|room| !room.is_empty()).collect()
    }

    /// Returns rooms that use each other in cycles.
    pub(super) fn rooms_in_knots(&self) -> Vec<Vec<String>> {
        let names: Vec<&str> = self.names().into_iter().collect();
        let number = |room: &str| names.binary_search(&room).ok();
        let mut uses = vec![BTreeSet::new(); names.len()];
        for (at, used) in self.uses.iter().enumerate() {
            let Some(from) = number(&self.room_of[at]) else {
                continue;
            };
            let to = used
                .iter()
                .filter_map(|&other| number(&self.room_of[other]));
            uses[from].extend(to.filter(|&to| to != from));
        }
        named(tied(&uses), |at| names[at].to_owned())
    }

    /// Returns the uses between files of different rooms of a cycle of rooms.
    pub(super) fn room_ties(&self) -> Vec<(&str, &str)> {
        let mut ties = Vec::new();
        for knot in self.rooms_in_knots() {
            let is_in = |at: usize| knot.contains(&self.room_of[at]);
            for from in (0..self.uses.len()).filter(|&from| is_in(from)) {
                let other = |to: &&usize| self.room_of[**to] != self.room_of[from] && is_in(**to);
                let inside = self.uses[from].iter().filter(other);
                ties.extend(inside.map(|&to| (&*self.paths[from], &*self.paths[to])));
            }
        }
        ties
    }

    /// Returns the uses between files in cycles.
    pub(super) fn ties(&self) -> Vec<(&str, &str)> {
        let mut ties = Vec::new();
        for circle in tied(&self.uses) {
            for &from in &circle {
                let inside = self.uses[from].iter().filter(|to| circle.contains(to));
                ties.extend(inside.map(|&to| (&*self.paths[from], &*self.paths[to])));
            }
        }
        ties
    }

    /// Returns files that use each other in cycles.
    pub(super) fn circles(&self) -> Vec<Vec<String>> {
        named(tied(&self.uses), |at| self.paths[at].clone())
    }
}

fn named(groups: Vec<Vec<usize>>, name: impl Fn(usize) -> String) -> Vec<Vec<String>> {
    let name = &name;
    groups
        .into_iter()
        .map(|group| group.into_iter().map(name).collect())
        .collect()
}

/// Returns the strongly connected components of more than one node.
fn tied(uses: &[BTreeSet<usize>]) -> Vec<Vec<usize>> {
    let mut order = Vec::new();
    let mut seen = vec![false; uses.len()];
    for start in 0..uses.len() {
        let mut stack = vec![(start, false)];
        while let Some((at, is_done)) = stack.pop() {
            if is_done {
                order.push(at);
            } else if !std::mem::replace(&mut seen[at], true) {
                stack.push((at, true));
                stack.extend(uses[at].iter().map(|&next| (next, false)));
            }
        }
    }
    let mut used_by = vec![Vec::new(); uses.len()];
    for (at, used) in uses.iter().enumerate() {
        for &other in used {
            used_by[other].push(at);
        }
    }
    let mut groups = Vec::new();
    let mut taken = vec![false; uses.len()];
    for &start in order.iter().rev() {
        let (mut group, mut stack) = (Vec::new(), vec![start]);
        while let Some(at) = stack.pop() {
            if !std::mem::replace(&mut taken[at], true) {
                group.push(at);
                stack.extend(&used_by[at]);
            }
        }
        if group.len() > 1 {
            group.sort_unstable();
            groups.push(group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate of these modules, the first of which is its root.
    fn sources(modules: &[(&str, &str)]) -> Sources {
        let file = |&(module, text): &(&str, &str)| {
            let names = module.split("::").filter(|name| !name.is_empty());
            let names = names.map(str::to_owned).collect();
            let (file, _) = super::super::sources::parse(module, names, text).expect("it is Rust");
            file
        };
        let files = modules.iter().map(file).collect();
        Sources { files }
    }

    #[test]
    fn names_are_followed_to_where_they_are_defined() {
        let sources = sources(&[
            ("", "mod a; mod b; mod c; pub use a::Thing;"),
            (
                "a",
                "mod inner; pub struct Thing; pub(crate) use inner::Other; fn f() { inner::g(); }",
            ),
            (
                "a::inner",
                "use super::*; impl Thing {} pub struct Other; pub(super) fn g() {}",
            ),
            (
                "b",
                "use crate::Thing; mod sealed { use super::Thing; impl Thing {} }",
            ),
            (
                "c",
                "pub struct Thing; impl Thing {} fn f() { assert!(crate::a::Other::is(), std::x()); }",
            ),
        ]);
        let graph = of(&sources);
        let uses = |from: usize, to: usize| graph.uses[from].contains(&to);
        assert!(uses(1, 2) && uses(2, 1), "{:?}", graph.uses);
        assert_eq!(graph.uses[3..], [1, 2].map(|used| BTreeSet::from([used])));
        let modules = Modules::of(&sources);
        let resolve = |path: &Vec<String>| modules.resolve(path).map(|(_, path)| path.join("::"));
        let types = sources.files.iter().flat_map(|file| &file.inherent);
        let types: Vec<_> = types.filter_map(resolve).collect();
        assert_eq!(types, ["a::Thing", "a::Thing", "c::Thing"]);
    }

    #[test]
    fn what_is_tied_in_circles_is_found() {
        let uses = [
            [1].into(),
            [2].into(),
            [0, 3].into(),
            [4].into(),
            BTreeSet::new(),
        ];
        assert_eq!(tied(&uses), [vec![0, 1, 2]]);
        assert!(tied(&[[1].into(), BTreeSet::new()]).is_empty());
    }
}
