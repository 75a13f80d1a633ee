// SPDX-License-Identifier: Apache-2.0
// From a struct into a message, or into another struct, fields that are called the same in both.
#pragma once

#include <boost/preprocessor/cat.hpp>
#include <boost/preprocessor/seq/for_each.hpp>
#include <boost/preprocessor/tuple/elem.hpp>
#include <boost/preprocessor/variadic/to_seq.hpp>

#define KVS_COPY_FIELD(r, names, field) \
  BOOST_PP_TUPLE_ELEM(0, names)->BOOST_PP_CAT(set_, field)(BOOST_PP_TUPLE_ELEM(1, names).field);

// to->set_a(from.a); to->set_b(from.b); ... for each field behind `from`; at most 64.
#define KVS_COPY_FIELDS(to, from, ...)                                                       \
  do {                                                                                       \
    BOOST_PP_SEQ_FOR_EACH(KVS_COPY_FIELD, (to, from), BOOST_PP_VARIADIC_TO_SEQ(__VA_ARGS__)) \
  } while (false)

#define KVS_ASSIGN_FIELD(r, names, field) \
  BOOST_PP_TUPLE_ELEM(0, names).field = BOOST_PP_TUPLE_ELEM(1, names).field;

// to.a = from.a; to.b = from.b; ... for each field behind `from`; at most 64.
#define KVS_ASSIGN_FIELDS(to, from, ...)                                                       \
  do {                                                                                         \
    BOOST_PP_SEQ_FOR_EACH(KVS_ASSIGN_FIELD, (to, from), BOOST_PP_VARIADIC_TO_SEQ(__VA_ARGS__)) \
  } while (false)
