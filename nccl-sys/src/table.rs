//! The macro that makes a table of optional functions: [`Api`](crate::Api), and that of `ep` with the feature of that name.

/// Makes the struct `Api` of a block of prototypes as bindgen writes them. The strings before it are for the
/// documentation: a name of the library and of its header, the module, a function, the one that returns the version, and one
/// with its arguments. `MissingFunction`, with a function `new`, has to be in scope.
macro_rules! function_table {
    (
        library: $library:literal,
        header: $header:literal,
        module: $module:literal,
        function: $function:literal,
        version: $version:literal,
        arguments: $with_arguments:literal $its_arguments:literal,
        unsafe extern $abi:literal {
        $(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    }) => {
        #[doc = concat!("The functions of ", $library, ": `None` where the library lacks one.")]
        ///
        /// Beside each field there is a method of the same name that turns `None` into a
        /// [`MissingFunction`], so that a call reads
        ///
        /// ```
        #[doc = concat!("# fn example(api: &", $module, "Api) -> Result<(), ", $module, "MissingFunction> {")]
        /// let mut version = 0;
        /// // SAFETY: the table comes from a real library, and `version` outlives the call.
        #[doc = concat!("let result = unsafe { api.", $version, "()?(&mut version) };")]
        /// # Ok(()) }
        /// ```
        ///
        /// The table holds addresses only. The code that fills it promises that they stay valid for as long as
        /// the table is used; a library opened by the [`Loader`](super::Loader) is never closed.
        #[derive(Clone, Copy)]
        pub struct Api {
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                pub $name: Option<unsafe extern $abi fn($($argument: $type),*) $(-> $result)?>,
            )*
        }

        impl Api {
            /// The names of all functions, in the order of the header.
            ///
            /// ```
            #[doc = concat!("assert!(", $module, "Api::NAMES.contains(&\"", $function, "\"));")]
            /// ```
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Returns names and types of a function's arguments, as the header has them; `None` for a function that the
            /// header lacks. For code between a program and NCCL: tracing, fault injection.
            ///
            /// ```
            #[doc = concat!("let arguments = ", $module, "Api::arguments(\"", $with_arguments, "\").unwrap();")]
            #[doc = concat!("assert_eq!(arguments, ", $its_arguments, ");")]
            /// ```
            pub fn arguments(function: &str) -> Option<&'static [(&'static str, &'static str)]> {
                match function {
                    $(stringify!($name) => {
                        Some(&[$((stringify!($argument), stringify!($type))),*])
                    })*
                    _ => None,
                }
            }

            /// Returns a table without functions.
            ///
            /// ```
            #[doc = concat!("assert!(", $module, "Api::empty().", $function, ".is_none());")]
            /// ```
            pub const fn empty() -> Self {
                Self { $($name: None),* }
            }

            /// Fills the table with the address that `resolve` returns for every function; null means that there is none.
            ///
            /// # Safety
            ///
            /// An address other than null must be that of a function with the prototype that
            #[doc = concat!("`", $header, "` gives to this name, and must stay valid for as long as the table, or a copy")]
            /// of it, is used.
            ///
            /// ```
            /// // SAFETY: no address is given.
            #[doc = concat!("let api = unsafe { ", $module, "Api::load(|_name| std::ptr::null_mut()) };")]
            #[doc = concat!("assert_eq!(api.missing().count(), ", $module, "Api::NAMES.len());")]
            /// ```
            pub unsafe fn load(mut resolve: impl FnMut(&core::ffi::CStr) -> *mut core::ffi::c_void) -> Self {
                Self {
                    $($name: {
                        const NAME: &core::ffi::CStr = crate::table::c_name(concat!(stringify!($name), "\0"));
                        let address = resolve(NAME);
                        // SAFETY: null becomes `None`, every other address is by the caller's promise a
                        // function of this very type; a data pointer and a function pointer are of
                        // the same size on every platform with `dlsym`.
                        unsafe {
                            core::mem::transmute::<
                                *mut core::ffi::c_void,
                                Option<unsafe extern $abi fn($($argument: $type),*) $(-> $result)?>,
                            >(address)
                        }
                    }),*
                }
            }

            /// Returns the names of the functions that this table lacks.
            ///
            /// ```
            #[doc = concat!("let api = ", $module, "Api::empty();")]
            #[doc = concat!("assert_eq!(api.missing().next(), ", $module, "Api::NAMES.first().copied());")]
            /// ```
            pub fn missing(&self) -> impl Iterator<Item = &'static str> + use<> {
                let present = [$(self.$name.is_some()),*];
                Self::NAMES.iter().zip(present).filter(|(_, there)| !there).map(|(name, _)| *name)
            }

            $(
                #[doc = concat!("`", stringify!($name), "`, or that it is missing.")]
                ///
                /// # Errors
                /// [`MissingFunction`] names the function, and the first release that has it.
                #[inline]
                pub fn $name(&self) -> Result<
                    unsafe extern $abi fn($($argument: $type),*) $(-> $result)?,
                    MissingFunction,
                > {
                    match self.$name {
                        Some(function) => Ok(function),
                        None => Err(MissingFunction::new(stringify!($name))),
                    }
                }
            )*
        }

        impl Default for Api {
            fn default() -> Self {
                Self::empty()
            }
        }

        impl core::fmt::Debug for Api {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                let missing: Vec<_> = self.missing().collect();
                f.debug_struct("Api")
                    .field("functions", &(Self::NAMES.len() - missing.len()))
                    .field("missing", &missing)
                    .finish()
            }
        }
    };
}
pub(crate) use function_table;

/// Returns the C string of a name that ends in NUL.
pub(crate) const fn c_name(name: &'static str) -> &'static core::ffi::CStr {
    match core::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name of a function is an identifier"),
    }
}
