//! The files of a crate: their modules, definitions and uses, and their amount of code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::Result;

pub(super) struct Sources {
    /// The first is the crate's root.
    pub(super) files: Vec<File>,
}

/// A path of names from the crate's root, without `crate`.
pub(super) type Names = Vec<String>;

/// A file that is compiled without `cfg(test)`.
#[derive(Default)]
pub(super) struct File {
    /// The path below `src`.
    pub(super) path: String,
    /// Its module.
    pub(super) module: Names,
    /// Lines that are neither blank nor comments nor tests.
    pub(super) code: usize,
    /// The items that the file defines, including those in inline modules.
    pub(super) items: BTreeSet<Names>,
    /// Names that its `use` items import, each as a path of the importing module, and their targets.
    pub(super) imports: BTreeMap<Names, Names>,
    /// Modules that import all names of another one, with that one.
    pub(super) globs: Vec<(Names, Names)>,
    /// The paths in the file's code, including the arguments of macros. A path may begin with a name from outside of this
    /// crate.
    pub(super) paths: BTreeSet<Names>,
    /// Types with inherent methods here.
    pub(super) inherent: BTreeSet<Names>,
}

/// The files of the crate whose root is `directory/lib.rs`.
pub(super) fn read(directory: &Path) -> Result<Sources> {
    let mut files = Vec::new();
    let mut waiting = vec![(String::from("lib.rs"), Vec::new())];
    while let Some((path, module)) = waiting.pop() {
        let text = fs::read_to_string(directory.join(&path))
            .map_err(|error| format!("cannot read {path}: {error}"))?;
        let (file, children) = parse(&path, module, &text)?;
        for child in children {
            let place = find(directory, &path, &child)?;
            waiting.push((place, child.module));
        }
        files.push(file);
    }
    Ok(Sources { files })
}

/// A module that has a file of its own.
pub(super) struct Child {
    module: Names,
    /// The path in its attribute `path`.
    place: Option<String>,
}

/// Parses a file, and finds its children.
pub(super) fn parse(path: &str, module: Names, text: &str) -> Result<(File, Vec<Child>)> {
    let parsed = syn::parse_file(text).map_err(|error| format!("{path}: {error}"))?;
    let mut reader = Reader {
        module: module.clone(),
        tests: Vec::new(),
        file: File::default(),
        children: Vec::new(),
    };
    reader.visit_file(&parsed);
    let Reader {
        tests,
        mut file,
        children,
        ..
    } = reader;
    let is_test = |line: usize| {
        let mut tests = tests.iter();
        tests.any(|&(first, last)| (first..=last).contains(&line))
    };
    file.code = text
        .lines()
        .enumerate()
        .filter(|(at, line)| {
            let line = line.trim_start();
            !line.is_empty() && !line.starts_with("//") && !is_test(at + 1)
        })
        .count();
    file.path = path.to_owned();
    file.module = module;
    Ok((file, children))
}

/// The path of a child's file.
fn find(directory: &Path, path: &str, child: &Child) -> Result<String> {
    if let Some(place) = &child.place {
        let beside = Path::new(path).parent().unwrap_or(Path::new(""));
        return Ok(beside.join(place).to_string_lossy().into_owned());
    }
    let stem = child.module.join("/");
    let candidates = [format!("{stem}.rs"), format!("{stem}/mod.rs")];
    candidates
        .into_iter()
        .find(|candidate| directory.join(candidate).is_file())
        .ok_or_else(|| {
            format!(
                "{path}: there is no file of `mod {}`",
                child.module.join("::")
            )
            .into()
        })
}

struct Reader {
    /// The module being read: the file's own, or an inline module.
    module: Names,
    /// First and last lines of code that is only compiled for tests.
    tests: Vec<(usize, usize)>,
    file: File,
    children: Vec<Child>,
}

/// Returns whether an item is only compiled for tests.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if attribute.path().is_ident("cfg") => {
            let said = list.tokens.to_string();
            said == "test" || said.starts_with("all (test") || said.starts_with("all(test")
        }
        _ => attribute.path().is_ident("test"),
    })
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item defines.
fn name(item: &syn::Item) -> Option<&syn::Ident> {
    use syn::Item;
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Macro(item) => item.ident.as_ref(),
        Item::Mod(item) => Some(&item.ident),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

fn names(path: &syn::Path) -> Names {
    let names = path.segments.iter();
    names.map(|segment| segment.ident.to_string()).collect()
}

impl Reader {
    /// Returns the path from the root, for a path in the module being read. A path into another crate becomes one that does not
    /// exist.
    fn rooted(&self, path: &[String]) -> Names {
        let mut base = self.module.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => {
                base.clear();
                rest = &path[1..];
            }
            Some("self") => rest = &path[1..],
            _ => {}
        }
        while let Some((next, others)) = rest.split_first()
            && next == "super"
        {
            base.pop();
            rest = others;
        }
        base.extend_from_slice(rest);
        base
    }

    fn child(&self, name: impl ToString) -> Names {
        let mut child = self.module.clone();
        child.push(name.to_string());
        child
    }

    /// Records a path in the code. A single name is defined in this file, or was imported.
    fn note(&mut self, path: &[String]) {
        if path.len() > 1 {
            let path = self.rooted(path);
            self.file.paths.insert(path);
        }
    }

    /// Records the paths among the tokens of a macro.
    fn scan(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Vec::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.note(&path);
                        path.clear();
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                other => {
                    self.note(&path);
                    path.clear();
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.scan(group.stream());
                    }
                }
            }
        }
        self.note(&path);
    }

    /// Returns whether an item with these attributes is only compiled for tests, and is left out.
    fn leaves_out(&mut self, attributes: &[syn::Attribute], span: Span) -> bool {
        let is_test = is_test(attributes);
        if is_test {
            self.tests.push((span.start().line, span.end().line));
        }
        is_test
    }

    fn import(&mut self, mut prefix: Names, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.import(prefix, &path.tree);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(prefix.clone(), tree);
                }
            }
            syn::UseTree::Name(name) => {
                let mut name = name.ident.to_string();
                match name.as_str() {
                    "self" => name = prefix.last().cloned().unwrap_or_default(),
                    _ => prefix.push(name.clone()),
                }
                self.bring_in(name, &prefix);
            }
            syn::UseTree::Rename(rename) => {
                if rename.ident != "self" {
                    prefix.push(rename.ident.to_string());
                }
                self.bring_in(rename.rename.to_string(), &prefix);
            }
            syn::UseTree::Glob(_) => {
                let other = self.rooted(&prefix);
                self.file.globs.push((self.module.clone(), other));
            }
        }
    }

    fn bring_in(&mut self, name: String, path: &[String]) {
        let path = self.rooted(path);
        // There may be several of these.
        if name == "_" {
            self.file.paths.insert(path);
        } else {
            self.file.imports.insert(self.child(name), path);
        }
    }
}

/// Visits nodes that are not necessarily items, unless they are only compiled for tests.
macro_rules! without_tests {
    ($($visit:ident($node:ident);)*) => {$(
        fn $visit(&mut self, node: &'ast syn::$node) {
            if !self.leaves_out(&node.attrs, node.span()) {
                visit::$visit(self, node);
            }
        }
    )*};
}

impl<'ast> Visit<'ast> for Reader {
    without_tests! {
        visit_arm(Arm);
        visit_expr_block(ExprBlock);
        visit_expr_call(ExprCall);
        visit_expr_for_loop(ExprForLoop);
        visit_expr_if(ExprIf);
        visit_expr_macro(ExprMacro);
        visit_expr_match(ExprMatch);
        visit_expr_method_call(ExprMethodCall);
        visit_expr_path(ExprPath);
        visit_expr_struct(ExprStruct);
        visit_expr_try(ExprTry);
        visit_expr_unsafe(ExprUnsafe);
        visit_expr_while(ExprWhile);
        visit_field(Field);
        visit_field_pat(FieldPat);
        visit_field_value(FieldValue);
        visit_impl_item_const(ImplItemConst);
        visit_impl_item_fn(ImplItemFn);
        visit_impl_item_type(ImplItemType);
        visit_local(Local);
        visit_stmt_macro(StmtMacro);
        visit_trait_item_const(TraitItemConst);
        visit_trait_item_fn(TraitItemFn);
        visit_variant(Variant);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        if self.leaves_out(attributes(item), item.span()) {
            return;
        }
        if let Some(name) = name(item) {
            self.file.items.insert(self.child(name));
        }
        match item {
            syn::Item::Use(item) => self.import(Vec::new(), &item.tree),
            syn::Item::Mod(item) if item.content.is_none() => {
                let place = item
                    .attrs
                    .iter()
                    .find_map(|attribute| match &attribute.meta {
                        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => {
                            match &pair.value {
                                syn::Expr::Lit(syn::ExprLit {
                                    lit: syn::Lit::Str(text),
                                    ..
                                }) => Some(text.value()),
                                _ => None,
                            }
                        }
                        _ => None,
                    });
                self.children.push(Child {
                    module: self.child(&item.ident),
                    place,
                });
            }
            syn::Item::Mod(item) => {
                self.module.push(item.ident.to_string());
                visit::visit_item_mod(self, item);
                self.module.pop();
            }
            syn::Item::Impl(item) => {
                if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty) {
                    let of = self.rooted(&names(&of.path));
                    self.file.inherent.insert(of);
                }
                visit::visit_item_impl(self, item);
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.note(&names(path));
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        visit::visit_macro(self, mac);
        self.scan(mac.tokens.clone());
    }

    /// The path of a visibility is not a use.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str) -> Names {
        path.split("::").map(str::to_owned).collect()
    }

    #[test]
    fn paths_within_modules_of_a_file_and_within_macros_are_from_the_root() {
        let text = "
            use crate::other::Thing;
            pub(in crate::room) mod sealed {
                use super::Thing;
                pub fn f() { super::super::beside(); }
            }
            fn f() {
                assert!(crate::macros::g() == [super::h::<u8>(), child::i(x.y)]);
            }
        ";
        let (file, _) = parse("room/file.rs", path("room::file"), text).expect("it is Rust");
        let imports = [
            ("room::file::Thing", "other::Thing"),
            ("room::file::sealed::Thing", "room::file::Thing"),
        ];
        let imports = imports.map(|(name, of)| (path(name), path(of)));
        assert_eq!(file.imports, BTreeMap::from(imports));
        let paths = [
            "room::beside",
            "macros::g",
            "room::h",
            "room::file::child::i",
        ];
        assert_eq!(file.paths, BTreeSet::from(paths.map(path)));
    }

    #[test]
    fn what_only_tests_have_is_no_code_wherever_it_is() {
        let text = "
            struct S {
                x: u8,
                #[cfg(test)]
                y: crate::tested::Y,
            }
            impl S {
                #[cfg(test)]
                fn f() {
                    crate::tested::f();
                }
                fn g() -> Option<()> {
                    #[cfg(test)]
                    crate::tested::g()?;
                    #[cfg(test)]
                    let x = crate::tested::h();
                    crate::used::i()
                }
            }
        ";
        let (file, _) = parse("file.rs", path("file"), text).expect("it is Rust");
        assert_eq!(file.paths, BTreeSet::from([path("used::i")]));
        assert_eq!(file.code, 8);
    }
}
