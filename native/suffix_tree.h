// The search tree over reversed contexts that both levels of running texts grow: its newest place is the root, and of
// equal contexts the newest place stays.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::suffix {

constexpr int kSteps = 96;  // nodes visited; the subtree below is forgotten (degenerate texts only)

// Makes the last of `nodes` the root, over the tree of the others split in two: `less` and `greater`.
// `order(node, from, length)` is the sign of a node's context minus the new one's, and sets their common length; the
// first `from` are equal.
template <typename Node, typename Order>
void make_root(std::vector<Node>& nodes, int32_t& root, Order order) {
  int32_t node = root, *less = &nodes.back().less, *greater = &nodes.back().greater;
  root = static_cast<int32_t>(nodes.size()) - 1;
  int below = 0, above = 0;  // common lengths with the nearest smaller and greater context seen
  for (int steps = kSteps; node >= 0 && steps; --steps) {
    int length, sign = order(node, below < above ? below : above, length);
    if (sign == 0) {  // the newest of equal contexts replaces the older one
      *less = nodes[node].less, *greater = nodes[node].greater;
      return;
    }
    if (sign < 0) {
      *less = node, below = length;
      less = &nodes[node].greater, node = *less;
    } else {
      *greater = node, above = length;
      greater = &nodes[node].less, node = *greater;
    }
  }
  *less = *greater = -1;
}

}  // namespace paceline::suffix
