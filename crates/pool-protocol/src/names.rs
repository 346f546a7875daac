//! The names of an enumeration: on the wire, in a database, for people.

/// Gives each value of an enumeration a name: `ALL`, `name` and `of_name`.
#[macro_export]
macro_rules! names {
    ($kind:ident { $($value:ident = $name:literal),+ $(,)? }) => {
        impl $kind {
            /// All values.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// Returns the name of a value.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)+
                }
            }

            /// Returns the value with this name.
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.name() == name)
            }
        }
    };
}
