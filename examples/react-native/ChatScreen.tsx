/** The conversations of a user, and a live view of the open one. */
import type { ChatClient, TokenSource } from '@chat-gateway/client';
import { useConnection, useConversation, useInbox } from '@chat-gateway/client/react';
import { useEffect, useState } from 'react';
import { AppState, FlatList, KeyboardAvoidingView, Platform, Pressable, Text, TextInput, View } from 'react-native';
import { createChat, start } from './chat';

interface Props {
  url: string;
  user: string;
  token: TokenSource;
}

/** Give it the user as its `key`: another user needs another client. */
export function ChatScreen({ url, user, token }: Props) {
  const [chat] = useState(() => createChat(url, user, token));
  const [id, setId] = useState<string>();
  const [other, setOther] = useState('');
  const [refusal, setRefusal] = useState('');
  const { at, error } = useConnection(chat);
  const { items } = useInbox(chat);
  useEffect(() => start(chat), [chat]);
  if (id) return <Thread key={id} chat={chat} id={id} close={() => setId(undefined)} />;
  const open = () => {
    chat.dm(other.trim()).then(
      (dm) => setId(dm.id),
      ({ message }: Error) => setRefusal(message),
    );
  };
  return (
    <View style={{ flex: 1 }}>
      <Text accessibilityLiveRegion="polite">{error ? error.message : at}</Text>
      <FlatList
        data={items}
        keyExtractor={({ conversation }) => conversation}
        renderItem={({ item: { conversation, name, unread } }) => (
          <Pressable accessibilityRole="button" onPress={() => setId(conversation)}>
            <Text>
              {name} {unread > 0 && `(${unread} new)`}
            </Text>
          </Pressable>
        )}
      />
      <TextInput accessibilityLabel="With" autoCapitalize="none" value={other} onChangeText={setOther} onSubmitEditing={open} />
      <Text accessibilityRole="alert">{refusal}</Text>
    </View>
  );
}

function Thread({ chat, id, close }: { chat: ChatClient; id: string; close(): void }) {
  const { conversation, messages } = useConversation(chat, id);
  const [text, setText] = useState('');
  const newest = messages.at(-1)?.seq;
  const [isActive, setActive] = useState(AppState.currentState === 'active');
  useEffect(() => {
    const watch = AppState.addEventListener('change', (state) => setActive(state === 'active'));
    return () => watch.remove();
  }, []);
  useEffect(() => {
    // What comes while the app is not in front is unread.
    if (newest && isActive) conversation.read(newest);
  }, [conversation, newest, isActive]);
  const send = () => {
    if (!text.trim()) return;
    conversation.send(text).catch(() => {}); // The list shows it as failed.
    setText('');
  };
  return (
    <KeyboardAvoidingView style={{ flex: 1 }} behavior={Platform.OS === 'ios' ? 'padding' : undefined}>
      <Pressable accessibilityRole="button" onPress={close}>
        <Text>Back to the conversations</Text>
      </Pressable>
      <FlatList
        inverted
        data={[...messages].reverse()}
        keyExtractor={({ key }) => key}
        onEndReached={() => conversation.loadOlder().catch(() => {})}
        renderItem={({ item: { sender, body, state } }) => (
          <Text>
            {sender}: {body} {state && `(${state})`}
          </Text>
        )}
      />
      <TextInput accessibilityLabel="Message" value={text} onChangeText={setText} onSubmitEditing={send} submitBehavior="submit" />
      <Pressable accessibilityRole="button" onPress={send}>
        <Text>Send</Text>
      </Pressable>
    </KeyboardAvoidingView>
  );
}
