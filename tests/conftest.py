"""One warning that must stay a warning."""


def pytest_configure(config):
    # SWIG's module start (sentencepiece, which transformers imports) leaves half-made types behind where this is
    # an error; the interpreter then crashes at its exit with status 139.
    config.addinivalue_line("filterwarnings", "ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
