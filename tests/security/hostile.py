"""Names that attack the places they are put into."""

PATHS = ("../../etc/cron.d/x", "/etc/passwd", "..", ".", "a/../../b", "~root/x", "C:\\x", "%2e%2e%2fx")
SHELL = (
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "| touch pwned",
    "&& touch pwned",
    "'; touch pwned; '",
)
OPTIONS = ("--privileged", "-v/:/host", "-oProxyCommand=touch pwned", "--entrypoint=sh")
TEMPLATES = ("{{ 7 * 7 }}", "{% raw %}", "{{ var.value.secret }}", "${HOME}", "%(asctime)s", "{0.__class__}")
PAGES = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "' autofocus onfocus=window.pwned=1 x='",
    "javascript:window.pwned=1",
    "</script><script>window.pwned=1</script>",
    "{{constructor.constructor('window.pwned=1')()}}",
    "<iframe srcdoc='<script>parent.pwned=1</script>'>",
)
REDIS = ("*\r\n".strip(), "{gpu_manager}:meta", "') redis.call('FLUSHALL') --", "leases", "a b c")
MARKUP = ("[red]x[/red]", "[/red]", "[link=http://evil.example]x[/link]", ":smile:", "[bold")
NAMES = (*PATHS, *SHELL, *OPTIONS, *TEMPLATES, *PAGES, *REDIS, *MARKUP)

UNPRINTABLE = (
    "a\nb",
    "a\rb",
    "a\x00b",
    "a\x1b[31mb",
    "a\x1b]0;title\x07",
    "a\x9b31mb",
    "a\x85b",
    "a\u2028b",
    "a\u202egnp.exe",
    "a\u2066b",
    "a\u200bb",
    "a\ufeffb",
    "a\u061cb",
    "a\u00adb",
    "a\u3164b",
    "\u3164",
    "a\ufe0fb",
    "a\U000e0061\U000e007fb",
    "a\U000e0100b",
    "a\u00a0b",
    "a\u3000b",
    "a\u034fb",
    "a\u206ab",
    "a\ue000b",
    "ad\u200cmin",
    "ad\u200dmin",
    "\u200cadmin",
    "\u06a9\u200c",
    "\u06a9\u200c\u200c\u06a9",
    "\u06a9\u200da",
    "\u0967\u200d\u0967",
)
"""Names to refuse: they could forge a line, control a terminal, or look like another name."""
