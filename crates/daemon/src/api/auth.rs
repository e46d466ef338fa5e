//! Which requests are allowed.
//!
//! The Unix socket is protected by its file's mode; the TCP listener by a token. On both, every
//! request of every method must name a host of the daemon and, if it comes from a web page, come
//! from a page of the daemon: a foreign page whose name was bound to 127.0.0.1 (DNS rebinding)
//! sends its own name as Host, and a form on a foreign page sends its address as Origin.

use crate::error::Refusal;
use crate::token::Token;
use crate::types::ErrorCode;
use axum::http::{HeaderMap, header};
use std::net::SocketAddr;

/// Through which listener a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ApiListener {
    Unix,
    Tcp { address: SocketAddr },
}

/// Refuses a request that may not come in through this door.
pub(super) fn check(listener: ApiListener, token: &Token, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
    let host = one(headers, header::HOST).filter(|h| is_ours(h, listener)).ok_or_else(|| {
        Refusal::new(
            ErrorCode::ForbiddenHost,
            "the Host header names no host of this daemon: use localhost or 127.0.0.1",
        )
    })?;
    if headers.contains_key(header::ORIGIN) {
        let origin = one(headers, header::ORIGIN).and_then(|o| o.strip_prefix("http://"));
        if origin.is_none_or(|o| !o.eq_ignore_ascii_case(host)) {
            return Err(Refusal::new(
                ErrorCode::ForbiddenOrigin,
                "the request comes from a web page of another origin: only this daemon's own pages may ask",
            ));
        }
    }
    if listener == ApiListener::Unix {
        return Ok(());
    }
    let given = one(headers, header::AUTHORIZATION).and_then(|a| a.strip_prefix("Bearer ")).unwrap_or("");
    let for_push = pushed_job(path).is_some_and(|job| token.for_push(job).matches(given));
    if token.matches(given) || for_push {
        return Ok(());
    }
    Err(Refusal::new(
        ErrorCode::Unauthorised,
        "the token is missing or wrong: send `Authorization: Bearer TOKEN` with the content of the state directory's token file",
    ))
}

/// The value of a header that occurs exactly once.
fn one(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

fn is_ours(host: &str, listener: ApiListener) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    };
    let is_common = ["localhost", "127.0.0.1", "[::1]"].iter().any(|h| name.eq_ignore_ascii_case(h));
    match listener {
        ApiListener::Unix => is_common,
        ApiListener::Tcp { address } => {
            // Another loopback address may be listened on, such as 127.9.9.9.
            let is_here = host.parse() == Ok(address);
            is_here || (is_common && port.and_then(|p| p.parse::<u16>().ok()) == Some(address.port()))
        }
    }
}

/// The id in `/v1/jobs/ID/push`.
fn pushed_job(path: &str) -> Option<u64> {
    path.strip_prefix("/v1/jobs/")?.strip_suffix("/push")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: ApiListener =
        ApiListener::Tcp { address: SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8080) };

    fn headers(list: &[(header::HeaderName, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in list {
            map.append(name, value.parse().unwrap());
        }
        map
    }

    #[test]
    fn only_our_hosts_and_our_pages() {
        let token = Token::of_text("a".repeat(64));
        let bearer = format!("Bearer {}", "a".repeat(64));
        let auth = (header::AUTHORIZATION, bearer.as_str());
        let code = |listener, list: &[_]| check(listener, &token, "/v1/jobs", &headers(list)).map_err(|e| e.code);
        for host in ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:8080"] {
            assert_eq!(code(TCP, &[(header::HOST, host), auth.clone()]), Ok(()), "{host}");
        }
        for host in [
            "evil.example:8080",
            "localhost",
            "localhost:80",
            "localhost:8080.evil.example",
            "127.0.0.1.evil:8080",
            "",
            "[::1]",
        ] {
            assert_eq!(code(TCP, &[(header::HOST, host), auth.clone()]), Err(ErrorCode::ForbiddenHost), "{host}");
        }
        let host = (header::HOST, "localhost:8080");
        assert_eq!(code(TCP, &[host.clone(), host.clone(), auth.clone()]), Err(ErrorCode::ForbiddenHost));
        assert_eq!(code(TCP, &[host.clone(), (header::ORIGIN, "http://localhost:8080"), auth.clone()]), Ok(()));
        for origin in
            ["http://evil.example", "null", "https://localhost:8080", "http://localhost:81", "http://localhost:8080/x"]
        {
            let list = [host.clone(), (header::ORIGIN, origin), auth.clone()];
            assert_eq!(code(TCP, &list), Err(ErrorCode::ForbiddenOrigin), "{origin}");
        }
        assert_eq!(code(ApiListener::Unix, &[(header::HOST, "localhost")]), Ok(()));
        assert_eq!(code(ApiListener::Unix, &[(header::HOST, "evil.example")]), Err(ErrorCode::ForbiddenHost));
        assert_eq!(code(ApiListener::Unix, &[]), Err(ErrorCode::ForbiddenHost));
    }

    #[test]
    fn the_address_that_is_listened_on_is_a_host() {
        let token = Token::of_text("a".repeat(64));
        let bearer = format!("Bearer {}", "a".repeat(64));
        let listener = ApiListener::Tcp { address: "127.9.9.9:8080".parse().unwrap() };
        let is_ok = |host: &str| {
            let list = [(header::HOST, host), (header::AUTHORIZATION, bearer.as_str())];
            check(listener, &token, "/v1/jobs", &headers(&list)).is_ok()
        };
        assert!(is_ok("127.9.9.9:8080") && is_ok("localhost:8080"));
        assert!(!is_ok("127.9.9.8:8080") && !is_ok("127.9.9.9:81") && !is_ok("127.9.9.9"));
    }

    #[test]
    fn a_push_token_opens_its_own_route_only() {
        let token = Token::of_text("b".repeat(64));
        let bearer = format!("Bearer {}", token.for_push(7).text());
        let list = [(header::HOST, "localhost:8080"), (header::AUTHORIZATION, bearer.as_str())];
        let ok = |path| check(TCP, &token, path, &headers(&list)).is_ok();
        assert!(ok("/v1/jobs/7/push"));
        assert!(!ok("/v1/jobs/8/push") && !ok("/v1/jobs/7/stop") && !ok("/v1/jobs"));
        assert!(check(TCP, &token, "/v1/jobs", &headers(&list[..1])).is_err());
    }
}
