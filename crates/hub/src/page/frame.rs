//! The parts that all pages share.

use std::time::SystemTime;

use axum::http::StatusCode;
use axum::response::{Html, IntoResponse as _, Response};
use maud::{DOCTYPE, Markup, html};

use super::viewer::Viewer;
use super::words::moment;

pub(super) fn respond(status: StatusCode, page: Markup) -> Response {
    (status, Html(page.into_string())).into_response()
}

pub(super) fn page(title: &str, viewer: Option<&Viewer>, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Mayfly" }
                link rel="icon" href="/ui/icon.svg" type="image/svg+xml";
                link rel="stylesheet" href="/ui/style.css";
                script src="/ui/script.js" defer {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                header.top {
                    a.brand href="/ui" { "Mayfly" }
                    @if let Some(viewer) = viewer {
                        nav aria-label="Pages" { a href="/ui" { "Pools" } }
                        (who(viewer))
                    }
                }
                main #main tabindex="-1" { (content) }
                footer {
                    span #as-of data-live { "As of " (moment(SystemTime::now())) }
                    @if viewer.is_some() { a #refresh href="" { "Refresh" } }
                    span #live-state role="status" {}
                    span.version { "Mayfly " (env!("CARGO_PKG_VERSION")) }
                }
            }
        }
    }
}

fn who(viewer: &Viewer) -> Markup {
    html! {
        div.who {
            @match viewer {
                Viewer::Pool(pool) => span { "Token of pool " b { (pool) } },
                Viewer::Operator => span { "Operator" },
                Viewer::Named(name) => span { "Operator " b { (name) } },
                Viewer::Open => span { "No authentication" },
            }
            @if viewer.can_log_out() {
                form method="post" action="/ui/logout" { button type="submit" { "Log out" } }
            }
        }
    }
}

pub(super) fn message(title: &str, text: &str) -> Markup {
    let content = html! {
        section.narrow {
            h1 { (title) }
            p { (text) }
            p { a href="/ui" { "Back to the pools" } }
        }
    };
    page(title, None, &content)
}

pub(super) fn login(next: &str, problem: Option<&str>) -> Markup {
    let content = html! {
        section.narrow {
            h1 { "Log in" }
            p { "The token of a pool shows that pool. The token of an operator shows all pools." }
            @if let Some(problem) = problem {
                p.problem role="alert" #problem { (problem) }
            }
            form method="post" action="/ui/login" {
                input type="hidden" name="next" value=(next);
                label for="token" { "Token" }
                input #token type="password" name="token" required autocomplete="current-password"
                    spellcheck="false" autofocus
                    placeholder="mfp_… or mfo_…" aria-describedby=[problem.map(|_| "problem")];
                button.primary type="submit" { "Log in" }
            }
        }
    };
    page("Log in", None, &content)
}
