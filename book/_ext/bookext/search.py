"""Chinese search without a dictionary: every pair of neighbouring characters is a word of the index.

The query is cut the same way in the browser, so a phrase of any length is found where all of its pairs stand.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese

CJK = r"\u3400-\u9fff\uf900-\ufaff"  # the same escapes hold in Python's and in JavaScript's regular expressions


class SearchChineseBigrams(SearchChinese):
    _part = re.compile(f"[{CJK}]+|[^\\W{CJK}]+")
    js_splitter_code = """
var splitQuery = (query) => {
  const words = [];
  for (const part of query.match(/[CJK]+|[\\p{Letter}\\p{Number}_]+/gu) || []) {
    if (!/[CJK]/.test(part) || part.length === 1) { words.push(part); continue; }
    for (let i = 0; i + 1 < part.length; i++) words.push(part.slice(i, i + 2));
  }
  return words;
};
""".replace("CJK", CJK)

    def split(self, input: str) -> list[str]:
        words: list[str] = []
        for part in self._part.findall(input):
            if re.match(f"[{CJK}]", part):
                words += [*part, *(part[i : i + 2] for i in range(len(part) - 1))]
            else:
                words.append(part)
        return words

    def stem(self, word: str) -> str:
        stemmed: str = self.stemmer.stemWord(word.lower())
        return word.lower() if len(stemmed) < 3 <= len(word) else stemmed  # searchtools.js does the same

    def word_filter(self, stemmed_word: str) -> bool:
        return len(stemmed_word) > 1 or bool(re.match(f"[{CJK}]", stemmed_word))


def setup(app: Sphinx) -> None:
    app.add_search_language(SearchChineseBigrams)
